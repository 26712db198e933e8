"""A Ray cluster of several machines on this one, 127.0.0.2, 127.0.0.3 and so on, with GPUs that are not there.

The head is the one that `pronghorn up` starts, with its environment and token; nothing touches the user's home.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster import config, processes, ray_head
from cluster.die_with_parent import bound
from cluster.ports import free_port
from cluster.ray_head import RayHead

STOP_S = 10.0
JOIN_S = 120.0
JOIN_ATTEMPTS = 3


@dataclass
class RayCluster:
    address: str
    environ: dict[str, str]
    """For whoever joins it: the token's place is in it."""
    run_id: str
    temp_dir: Path
    dashboard_url: str
    """Where it was asked for."""
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add_machine(self, gpus: int = 0) -> str:
        """The next address, once Ray has started there; its label `machine` is the address's last number. One after
        another: several at once time out on a busy host, where Ray gives up on one alone after 30 s, too."""
        for _ in range(JOIN_ATTEMPTS):
            number = len(self.joined) + 3
            log_path = self.temp_dir / f"machine-{number}.log"
            started = self._start_machine(number, gpus, log_path)
            give_up_s = time.monotonic() + JOIN_S
            while started.poll() is None:
                if "Ray runtime started" in log_path.read_text():
                    return f"127.0.0.{number}"
                assert time.monotonic() < give_up_s, log_path.read_text()
                time.sleep(0.1)  # another process, which tells by its log alone
        raise AssertionError(log_path.read_text())

    def _start_machine(self, number: int, gpus: int, log_path: Path) -> subprocess.Popen[bytes]:
        options = [f"--address={self.address}", f"--node-ip-address=127.0.0.{number}", f"--num-gpus={gpus}"]
        options += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        options += ["--include-log-monitor=false", "--labels", f"machine={number}"]
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *options]
        with log_path.open("wb") as log:
            started = subprocess.Popen(
                bound(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
            )
        self.joined.append(started)
        return started

    def kill_machine(self, address: str) -> None:
        """Its raylet, at once; Ray's other processes of that machine end when they see it."""
        (raylet,) = [
            process
            for process in processes.of_run(self.run_id, self.temp_dir)
            if process.name() == "raylet" and f"--node_ip_address={address}" in process.cmdline()
        ]
        raylet.kill()


class HeadWithGpus(RayHead):
    def __init__(self, gpus: int, dashboard: bool, temp_dir: Path, environ: dict[str, str]) -> None:
        port = free_port()
        super().__init__(temp_dir, port, environ)
        self._gpus = gpus
        self._dashboard = dashboard
        self.dashboard_url = f"http://127.0.0.1:{port}"

    def _command(self) -> list[str]:
        ours = [f"--num-gpus={self._gpus}", f"--include-dashboard={str(self._dashboard).lower()}"]
        return [*super()._command(), *ours, "--labels", "machine=2"]


@contextmanager
def machines(
    run_id: str, gpus: tuple[int, ...], root: Path, settings: Mapping[str, str] | None = None, dashboard: bool = False
) -> Iterator[RayCluster]:
    """`gpus` of each, the head first; `root` goes first on every process's import path, and `settings` are in the
    environment of all of them."""
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:  # short, as Unix sockets lie in it
        temp_dir = Path(folder)
        (temp_dir / "t").mkdir()
        ray_head.write_token(temp_dir / "token")
        environ = ray_head.environment(
            config.environment(), run_id, temp_dir, temp_dir / "token", haproxy=False, taken=set()
        )
        environ |= {"PYTHONPATH": str(root), **(settings or {})}
        head = HeadWithGpus(gpus[0], dashboard, temp_dir, environ)
        joined: list[subprocess.Popen[bytes]] = []
        try:
            running = RayCluster(head.start(), environ, run_id, temp_dir, head.dashboard_url, joined)
            for of_one in gpus[1:]:
                running.add_machine(of_one)
            yield running
        finally:
            head.stop()
            left = processes.end_run(run_id, temp_dir)
            for machine in joined:
                machine.wait(STOP_S)
            assert not left, f"Ray processes that do not end: {left}"
