"""A Ray cluster of several machines on this one, 127.0.0.2, 127.0.0.3 and so on, with GPUs that are not there.

The head is the one that `pronghorn up` starts, with its environment and token; nothing touches the user's home. Where
the GCS is given a Redis it keeps its state there and so outlives its own death (`gcs.py`). Every call blocks.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster import config, processes, ray_head
from cluster.chaos.gcs import GcsServer
from cluster.die_with_parent import bound
from cluster.ports import free_port
from cluster.ray_head import LOOPBACK_NODE_IP, RayHead
from cluster.redis_server import RedisServer
from pronghorn.errors import ConfigurationError, Unavailable

STOP_S = 10.0
JOIN_S = 120.0
START_ATTEMPTS = 3
JOIN_ATTEMPTS = 3
FIRST_JOINED = 3
"""The last number of the first address that joins."""


@dataclass
class RayCluster:
    address: str
    environ: dict[str, str]
    """For what runs on its machines."""
    client_environ: dict[str, str]
    """For whoever joins it: the token's place is in it."""
    run_id: str
    temp_dir: Path
    dashboard_url: str
    """Where it was asked for."""
    gcs: GcsServer
    joined: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add_machine(self, gpus: int = 0) -> str:
        """The next address, once Ray has started there; its label `machine` is the address's last number. One after
        another: several at once time out on a busy host, where Ray gives up on one alone after 30 s, too.
        Raises ConfigurationError with what Ray said."""
        for _ in range(JOIN_ATTEMPTS):
            number = len(self.joined) + FIRST_JOINED
            log_path = self.temp_dir / f"machine-{number}.log"
            started = self._start_machine(number, gpus, log_path)
            give_up_s = time.monotonic() + JOIN_S
            while started.poll() is None and time.monotonic() < give_up_s:
                if "Ray runtime started" in log_path.read_text():
                    return f"127.0.0.{number}"
                time.sleep(0.1)  # another process, which tells by its log alone
        raise ConfigurationError(f"no machine joins {self.address}: {log_path.read_text()}")

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

    def of_run(self) -> list[psutil.Process]:
        return processes.of_run(self.run_id, self.temp_dir)

    def raylet(self, address: str) -> psutil.Process:
        """Ray's other processes of that machine end when they see that it has. Raises Unavailable where none runs."""
        for process in self.of_run():
            words = processes.words_of(process)
            if Path(words[0] if words else "").name == "raylet" and f"--node_ip_address={address}" in words:
                return process
        raise Unavailable(f"no raylet runs at {address}")

    def kill_machine(self, address: str) -> None:
        self.raylet(address).kill()

    def addresses(self) -> list[str]:
        """The addresses of those that run."""
        own = [LOOPBACK_NODE_IP, *(f"127.0.0.{number + FIRST_JOINED}" for number in range(len(self.joined)))]
        prefix = "--node_ip_address="
        there = {
            word.removeprefix(prefix)
            for process in self.of_run()
            for word in processes.words_of(process)
            if word.startswith(prefix)
        }
        return [address for address in own if address in there]


class _Head(RayHead):
    def __init__(self, options: list[str], temp_dir: Path, environ: dict[str, str], dashboard_port: int) -> None:
        super().__init__(temp_dir, dashboard_port, environ)
        self._options = options

    def _command(self) -> list[str]:
        return [*super()._command(), *self._options]


def _started(
    options: list[str], temp_dir: Path, environ: dict[str, str], run_id: str, dashboard_port: int
) -> tuple[_Head, str]:
    """A head and its address; Ray gives up on a start after 30 s, which a busy host may take."""
    for attempt in range(1, START_ATTEMPTS + 1):
        namespace = {"RAY_external_storage_namespace": f"{run_id}-{attempt}"}
        head = _Head(options, temp_dir, environ | namespace, dashboard_port)
        try:
            return head, head.start()
        except BaseException as error:
            head.stop()
            processes.end_run(run_id, temp_dir)
            shutil.rmtree(temp_dir / "r", ignore_errors=True)
            if attempt == START_ATTEMPTS or not isinstance(error, ConfigurationError):
                raise
    raise AssertionError("unreachable")


@contextmanager
def machines(
    run_id: str,
    gpus: tuple[int, ...],
    settings: Mapping[str, str],
    gcs_redis: RedisServer | None = None,
    dashboard: bool = False,
) -> Iterator[RayCluster]:
    """`gpus` of each, the head first; `settings` are in the environment of all of them. Raises ConfigurationError where
    Ray does not start."""
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:  # short, as Unix sockets lie in it
        temp_dir = Path(folder)
        (temp_dir / "t").mkdir()
        ray_head.write_token(temp_dir / "token")
        environ = ray_head.environment(
            config.environment(), run_id, temp_dir, temp_dir / "token", haproxy=False, taken=set()
        )
        environ |= settings
        options = [f"--num-gpus={gpus[0]}", f"--include-dashboard={str(dashboard).lower()}", "--labels", "machine=2"]
        of_head = dict(environ)
        if gcs_redis is not None:
            of_head["RAY_REDIS_ADDRESS"] = gcs_redis.address
            options.append(f"--redis-password={gcs_redis.password}")
        port = free_port()
        head, address = _started(options, temp_dir, of_head, run_id, port)
        token = {name: value for name, value in environ.items() if name.startswith("RAY_AUTH")}
        client = {**config.environment(), **settings, **token}
        gcs = GcsServer(address, run_id, temp_dir)
        running = RayCluster(address, environ, client, run_id, temp_dir, f"http://127.0.0.1:{port}", gcs)
        try:
            for of_one in gpus[1:]:
                running.add_machine(of_one)
            yield running
        finally:
            head.stop()
            left = processes.end_run(run_id, temp_dir)
            for child in [*running.joined, *gcs.started]:
                child.wait(STOP_S)
            assert not left, f"Ray processes that do not end: {left}"
