"""A Ray cluster of two machines on this one, 127.0.0.2 and 127.0.0.3, with GPUs that are not there.

The head is the one that `pronghorn up` starts, with its environment and token; nothing touches the user's home.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import config, processes, ray_head
from cluster.die_with_parent import bound
from cluster.ports import free_port
from cluster.ray_head import RayHead

SECOND_MACHINE = "127.0.0.3"
STOP_S = 10.0


@dataclass(frozen=True)
class RayCluster:
    address: str
    environ: dict[str, str]
    """For whoever joins it: the token's place is in it."""


class HeadWithGpus(RayHead):
    def __init__(self, gpus: int, temp_dir: Path, environ: dict[str, str]) -> None:
        super().__init__(temp_dir, free_port(), environ)
        self._gpus = gpus

    def _command(self) -> list[str]:
        return [*super()._command(), f"--num-gpus={self._gpus}", "--include-dashboard=false"]


@contextmanager
def two_machines(run_id: str, gpus: tuple[int, int], root: Path) -> Iterator[RayCluster]:
    """`gpus` of the head and of the second machine; `root` goes first on every process's import path."""
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:  # short, as Unix sockets lie in it
        temp_dir = Path(folder)
        (temp_dir / "t").mkdir()
        ray_head.write_token(temp_dir / "token")
        environ = ray_head.environment(
            config.environment(), run_id, temp_dir, temp_dir / "token", haproxy=False, taken=set()
        )
        environ["PYTHONPATH"] = str(root)
        head = HeadWithGpus(gpus[0], temp_dir, environ)
        second = None
        try:
            address = head.start()
            second = _join(address, gpus[1], temp_dir, environ)
            yield RayCluster(address, environ)
        finally:
            head.stop()
            left = processes.end_run(run_id, temp_dir)
            if second is not None:
                second.wait(STOP_S)
            assert not left, f"Ray processes that do not end: {left}"


def _join(address: str, gpus: int, temp_dir: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    options = [f"--address={address}", f"--node-ip-address={SECOND_MACHINE}", f"--num-gpus={gpus}"]
    ports = ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *options, *ports]
    with (temp_dir / "second.log").open("wb") as log:
        return subprocess.Popen(
            bound(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
        )
