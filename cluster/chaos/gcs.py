"""The GCS of a Ray cluster whose state is in Redis, killed and started again as whoever watches over a head pod would.

`ray start --block` ends a whole head whose GCS has died: it is stopped before, for good, and the GCS that comes back
is a child of ours. `ray start` itself refuses to start another head where raylets of that cluster live.
"""

import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from cluster import processes
from cluster.die_with_parent import bound
from pronghorn.errors import Unavailable

ANSWERS_S = 60.0
OWN_PORT = "--gcs_server_port="


class GcsServer:
    def __init__(self, address: str, run_id: str, temp_dir: Path) -> None:
        self._address = address
        self._run_id = run_id
        self._temp_dir = temp_dir
        self._argv: list[str] = []
        self._environ: dict[str, str] = {}
        self.started: list[subprocess.Popen[bytes]] = []

    def find(self) -> psutil.Process:
        """Raises Unavailable where none runs."""
        for process in processes.of_run(self._run_id, self._temp_dir):
            words = processes.words_of(process)
            if words and Path(words[0]).name == "gcs_server":
                return process
        raise Unavailable("the GCS does not run now")

    @property
    def is_kept(self) -> bool:
        """Whether its state is in a Redis, without which its end is the end of its cluster."""
        return any(word.startswith("--redis_address=") for word in processes.words_of(self.find()))

    def unwatched(self) -> psutil.Process:
        """It, once its death will be the death of nothing else."""
        server = self.find()
        self._argv, self._environ = server.cmdline(), server.environ()
        watcher = server.parent()
        if watcher is not None and "ray.scripts.scripts" in watcher.cmdline():
            watcher.suspend()
        return server

    def start(self) -> None:
        """At the same address, from what Redis has."""
        port = self._address.rpartition(":")[2]
        argv = [f"{OWN_PORT}{port}" if word.startswith(OWN_PORT) else word for word in self._argv]  # 0 is any port
        with (self._temp_dir / "gcs-again.log").open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    bound(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environ,
                    start_new_session=True,
                )
            )

    def wait_until_it_answers(self) -> None:
        """Raises Unavailable where it ends or takes too long."""
        host, _, port = self._address.rpartition(":")
        give_up_s = time.monotonic() + ANSWERS_S
        while self.started[-1].poll() is None and time.monotonic() < give_up_s:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return
            time.sleep(0.05)  # another process, which tells by its port alone
        raise Unavailable(f"the GCS does not come back: {(self._temp_dir / 'gcs-again.log').read_text()[-500:]}")
