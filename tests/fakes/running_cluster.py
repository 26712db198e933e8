"""A real cluster, started by the command that users type, and the proof that nothing of it stays.

Its home and its ports are its own, so a cluster that the developer runs beside it is not touched.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster import config, ports, processes
from cluster.run_folder import RunFolder, names

ROOT = Path(__file__).resolve().parents[2]
EXIT_S = 5.0
"""What the kernel may take on a busy machine to end a process that was killed; one that stays is found all the same."""
START_TIMEOUT_S = 420.0
COMMAND_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class CommandLine:
    """`pronghorn`, run as a user runs it, with a home of its own."""

    home: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environ,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "cluster.cli", *arguments]

    @property
    def environ(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "RAY_ADDRESS")}
        own = {"PRONGHORN_HOME": str(self.home / "p"), "PYTHONPATH": os.pathsep.join(paths)}
        return {**kept, **own, **self.settings}

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.home / "p", name)

    def end_all(self) -> None:
        """`down` for every cluster that was started here and is still there."""
        for name in names(self.home / "p"):
            done = self("down", "--name", name)
            assert done.returncode == 0, f"{name} did not end:\n{done.stdout}\n{done.stderr}"


@contextlib.contextmanager
def command_line(**settings: str) -> Iterator[CommandLine]:
    """In a home of its own; whatever was started there and not ended, because its test failed, is ended with it."""
    # Not tmp_path: Unix sockets live below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as home:
        pronghorn = CommandLine(Path(home), settings)
        try:
            yield pronghorn
        finally:
            pronghorn.end_all()


@dataclass(frozen=True)
class RunningCluster:
    name: str
    url: str
    run_id: str
    temp_dir: Path
    pronghorn: CommandLine

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def status(self) -> dict[str, Any]:
        done = self.pronghorn("status", "--json", "--name", self.name)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float) -> None:
        """Fails where an orchestrator does not say so within `limit_s`."""
        give_up_s = time.monotonic() + limit_s
        with httpx.Client(base_url=self.url, timeout=30.0, trust_env=False) as client:
            while not holds(status := client.get("/internal/status").json()):
                assert time.monotonic() < give_up_s, status
                time.sleep(0.1)  # the state of other processes, told by no event

    def wait_until_at_rest(self) -> None:
        def rests(status: dict[str, Any]) -> bool:
            nodes_rest = all(node["held_blocks"] == 0 and node["in_flight"] == 0 for node in status["nodes"])
            return status["in_flight"] == 0 and nodes_rest

        self.wait_until(rests, 30.0)

    def assert_ledger_clean(self, wait_s: float = 120.0) -> None:
        """Nobody holds anything for a request that has ended, once replaced nodes are back; fails naming what is left
        over."""
        done = self.pronghorn("verify", "ledger", "--name", self.name, f"--wait={wait_s}")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def processes(self) -> list[psutil.Process]:
        return processes.of_run(self.run_id, self.temp_dir)

    def replica_pids(self, deployment: str) -> list[int]:
        title = f"ServeReplica:pronghorn:{deployment}"
        return [p.pid for p in self.processes() if any(title in word for word in p.cmdline())]

    def assert_gone(self) -> None:
        """No process, no folder, and nobody listens where it served."""
        psutil.wait_procs(self.processes(), timeout=EXIT_S)
        left = self.processes()
        assert left == [], f"still there: {[p.as_dict(['pid', 'ppid', 'status', 'cmdline', 'cwd']) for p in left]}"
        assert not self.temp_dir.exists()
        assert not self.pronghorn.folder(self.name).path.exists()
        assert ports.is_free("127.0.0.1", self.port)


def start(pronghorn: CommandLine, name: str, *options: str) -> RunningCluster:
    """Detached. A port that `options` name wins over any free one."""
    done = pronghorn(
        "up", "--detach", "--name", name, "--port=0", "--dashboard-port=0", *options, timeout_s=START_TIMEOUT_S
    )
    assert done.returncode == 0, f"the cluster did not start:\n{done.stdout}\n{done.stderr}"
    return running(pronghorn, name)


def running(pronghorn: CommandLine, name: str) -> RunningCluster:
    """The cluster of that name, which is ready."""
    run, state = pronghorn.folder(name).run(), pronghorn.folder(name).state()
    assert run is not None and state is not None and state.url is not None
    return RunningCluster(name, state.url, run.run_id, Path(run.temp_dir), pronghorn)


def end(cluster: RunningCluster) -> None:
    """`pronghorn down`, and proof that nothing stays."""
    done = cluster.pronghorn("down", "--name", cluster.name)
    assert done.returncode == 0, done.stderr
    assert "left behind" not in done.stdout, f"the supervisor did not end by itself:\n{done.stdout}"
    cluster.assert_gone()


class Traces:
    """What a command that fails may leave on this machine: looked for again afterwards, by the name that it was given.

    A temporary folder carries no name, so it counts as left behind where it is new and no process is of its run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = self._folders()

    @staticmethod
    def _folders() -> set[Path]:
        return set(config.temp_base().glob("ph-*"))

    def assert_none(self) -> None:
        assert [run for run in _runs() if run.startswith(f"{self._name}-")] == []
        deserted = self._deserted()
        time.sleep(0.5 if deserted else 0.0)  # another cluster that has just begun has no process yet
        assert self._deserted() & deserted == set()

    def _deserted(self) -> set[Path]:
        inhabited = {run.rsplit("-", 1)[-1] for run in _runs()}
        return {path for path in self._folders() - self._before if path.name.removeprefix("ph-") not in inhabited}


def _runs() -> set[str]:
    """The runs of which a process lives."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.add(process.environ().get(processes.RUN_VARIABLE, ""))
    return found
