"""The wheel, in an environment of its own and an empty folder: every room and every file that one needs is in it."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_cluster import ROOT
from tests.fakes.tiny_model_folder import write_tiny_model
from tests.test_architecture import ROOMS

pytestmark = pytest.mark.timeout(600)


def run(*command: str, cwd: Path, environ: dict[str, str] | None = None, limit_s: float = 120.0) -> str:
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that are committed or would be: a build leaves folders behind, and finds what older ones left."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(built))
    run(sys.executable, "-m", "pip", "wheel", ".", *options, cwd=source)
    (found,) = built.glob("*.whl")
    return found


def test_every_module_of_every_room_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", *ROOMS, cwd=ROOT).splitlines()
    missing = [name for name in tracked if (ROOT / name).is_file() and name not in inside]
    assert missing == []
    assert not [name for name in inside if name.startswith(("tests/", "bench/"))]


@pytest.fixture
def fresh(wheel: Path) -> Iterator[Path]:
    """A folder with an environment that sees the libraries installed here and not this checkout: lines of a .pth are
    paths, whose own .pth files (an editable install is one) are not read."""
    with tempfile.TemporaryDirectory(prefix="pw-", dir="/tmp") as folder:  # short, as Unix sockets lie in it
        environment = Path(folder) / "venv"
        venv.create(environment, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
        (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        python = str(environment / "bin" / "python")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--force-reinstall",
            str(wheel), cwd=Path(folder))  # fmt: skip
        yield Path(folder)


def test_an_installed_wheel_serves_from_an_empty_folder(fresh: Path) -> None:
    model = write_tiny_model(fresh / "tiny")
    empty = fresh / "empty"
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REDIS_URL", "RAY_ADDRESS")}
    environ = kept | {"PRONGHORN_HOME": str(fresh / "p")}
    python, pronghorn = (str(fresh / "venv" / "bin" / name) for name in ("python", "pronghorn"))
    where = run(python, "-c", "import cluster, operations; print(cluster.__file__)", cwd=empty, environ=environ)
    assert Path(where.strip()).is_relative_to(fresh)

    sizes = ("--kv-memory=16MiB", "--threads=1", "--port=0", "--dashboard-port=0")
    try:
        run(pronghorn, "up", "--detach", "--model", str(model), *sizes, cwd=empty, environ=environ, limit_s=420.0)
        assert run(pronghorn, "chat", "Hello", "--max-tokens=4", cwd=empty, environ=environ).strip()
    finally:
        run(pronghorn, "down", cwd=empty, environ=environ)
    assert list(empty.iterdir()) == []
