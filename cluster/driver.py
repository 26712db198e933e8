"""The child process that speaks to Ray and Serve for a supervisor: what it is asked, what it answers, how it is held.

A process of its own because Ray's client takes its process with it: it aborts three seconds after a SIGTERM, when an
interrupted start is tried again, when its raylet ends; and its calls wait for a cluster that may have gone. Whatever
does not answer in time is killed here, and a new one can be asked.
"""

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from cluster.config import ClusterConfig
from cluster.die_with_parent import bound
from pronghorn.errors import ConfigurationError


class Join(msgspec.Struct, tag=True, frozen=True):
    """Become a client of the Ray cluster. Answered by Joined."""

    address: str
    config: ClusterConfig


class Deploy(msgspec.Struct, tag=True, frozen=True):
    """Ask Serve for the application. Answered by Deployed."""


class WaitUntilRunning(msgspec.Struct, tag=True, frozen=True):
    """Answered by any number of Progress, then Done."""

    limit_s: float


class Withdraw(msgspec.Struct, tag=True, frozen=True):
    """Let the application's requests end and take it away, Serve too where it is ours. Answered by Done."""

    limit_s: float
    serve_is_ours: bool


class Change(msgspec.Struct, tag=True, frozen=True):
    """Have Serve change the application that runs, and stay until it is so. Answered by any number of Progress, then
    Done."""

    limit_s: float
    sizes: dict[str, int] = {}
    """Replicas of a pool from now on, by its deployment's name; the others stay as they are."""
    without: str | None = None
    """A node that has left and is not to be replaced: its pool is one replica smaller from now on."""
    redeploy: bool = False
    """Replace every replica by a new one."""


Command = Join | Deploy | WaitUntilRunning | Change | Withdraw


class Joined(msgspec.Struct, tag=True, frozen=True):
    dashboard_url: str | None


class Deployed(msgspec.Struct, tag=True, frozen=True):
    serve_is_ours: bool
    """Whether Serve did not run before."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    text: str


class Done(msgspec.Struct, tag=True, frozen=True):
    pass


class Refused(msgspec.Struct, tag=True, frozen=True):
    message: str


Answer = Joined | Deployed | Progress | Done | Refused

CONNECT_S = "5"
"""How long Ray's client tries to reach a cluster; by itself it would try for 20 s."""
JOIN_TIMEOUT_S = 45.0
"""Importing Ray on a busy machine included."""

DEPLOY_TIMEOUT_S = 120.0
"""Serve's own limit for its proxies is 60 s."""
ANSWER_MARGIN_S = 10.0
"""What the child may take beyond the limit that it was given."""


class Driver:
    """Begins to import Ray at once; is to `join` before anything else. Its methods block, and raise ConfigurationError
    with what Ray or Serve said."""

    def __init__(self, folder: Path, environ: dict[str, str], module: str = "cluster.driver_process") -> None:
        """`folder`: where it stands, since Ray puts that on the import path of every worker."""
        self._process = subprocess.Popen(
            bound([sys.executable, "-P", "-m", module]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={"RAY_gcs_server_port_wait_time_s": CONNECT_S, **environ},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions: IO[bytes] = self._process.stdin
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), name="driver-answers", daemon=True).start()
        self.idle = True
        """False from a question to its answer; a driver that was left in between cannot be asked again."""

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(msgspec.DecodeError):
                    self._answers.put(msgspec.json.decode(line, type=Answer))
        self._answers.put(None)

    def join(self, address: str, config: ClusterConfig) -> Joined:
        answer = self._ask(Join(address, config), JOIN_TIMEOUT_S)
        assert isinstance(answer, Joined)
        return answer

    def deploy(self) -> Deployed:
        answer = self._ask(Deploy(), DEPLOY_TIMEOUT_S)
        assert isinstance(answer, Deployed)
        return answer

    def wait_until_running(self, limit_s: float, progress: Callable[[str], None]) -> None:
        self._ask(WaitUntilRunning(limit_s), limit_s + ANSWER_MARGIN_S, progress)

    def change(self, change: Change, progress: Callable[[str], None]) -> None:
        self._ask(change, change.limit_s + ANSWER_MARGIN_S, progress)

    def withdraw(self, limit_s: float, serve_is_ours: bool) -> None:
        self._ask(Withdraw(limit_s, serve_is_ours), limit_s + ANSWER_MARGIN_S)

    def _ask(
        self, command: Command, limit_s: float, progress: Callable[[str], None] = lambda _: None
    ) -> Joined | Deployed | Done:
        assert self.idle, "the driver was left amid a question"
        give_up_s = time.monotonic() + limit_s
        self.idle = False
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(msgspec.json.encode(command) + b"\n")
            self._questions.flush()
        while True:
            match self._next(give_up_s, limit_s):
                case Progress(text=text):
                    progress(text)
                case Refused(message=message):
                    self.idle = True
                    raise ConfigurationError(message)
                case Joined() | Deployed() | Done() as answer:
                    self.idle = True
                    return answer
                case None:
                    raise ConfigurationError(f"Ray's client has ended (exit code {self._process.wait()})")

    def _next(self, give_up_s: float, limit_s: float) -> Answer | None:
        try:
            return self._answers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except queue.Empty:
            self.kill()
            raise ConfigurationError(f"Ray did not answer within {limit_s:.0f} s") from None

    def kill(self) -> None:
        """A question under way then fails. May be called from a signal handler."""
        self._process.kill()

    def stop(self) -> None:
        self.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
