"""`pronghorn up` in the foreground of a terminal: what it shows is waited for, and the terminal's keys work."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fakes.running_cluster import CommandLine, RunningCluster, running

CTRL_C = b"\x03"


class Foreground:
    def __init__(self, process: subprocess.Popen[bytes], terminal_fd: int) -> None:
        self._process = process
        self._fd = terminal_fd
        self._shown = ""
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._fd, 65536)
            except OSError:  # EIO: nobody holds the other end any more
                piece = b""
            with self._news:
                self._shown += piece.decode(errors="replace")
                self._ended = not piece
                self._news.notify_all()
            if not piece:
                return

    def wait_for(self, text: str, limit_s: float) -> None:
        with self._news:
            self._news.wait_for(lambda: text in self._shown or self._ended, limit_s)
            assert text in self._shown, self._shown

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def hang_up(self) -> None:
        """The window is closed: the kernel sends SIGHUP, and nothing can be shown any more."""
        os.close(self._fd)
        self._fd = -1

    def wait(self, limit_s: float) -> int:
        return self._process.wait(limit_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._fd >= 0:
            self._reader.join()
            os.close(self._fd)


@contextmanager
def foreground(
    pronghorn: CommandLine, name: str, *options: str, as_background_job: bool = False
) -> Iterator[Foreground]:
    """A shell without job control starts its background jobs with SIGINT ignored."""
    terminal_fd, own_fd = pty.openpty()

    def in_child() -> None:
        fcntl.ioctl(own_fd, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests behind nohup has it ignored
        if as_background_job:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = subprocess.Popen(
        pronghorn.command("up", "--name", name, "--port=0", "--dashboard-port=0", *options),
        env=pronghorn.environ,
        cwd=pronghorn.home,
        stdin=own_fd,
        stdout=own_fd,
        stderr=own_fd,
        start_new_session=True,
        preexec_fn=in_child,
    )
    os.close(own_fd)
    shown = Foreground(process, terminal_fd)
    try:
        yield shown
    finally:
        shown.close()
        pronghorn("down", "--name", name)


def ready(shown: Foreground, pronghorn: CommandLine, name: str, limit_s: float) -> RunningCluster:
    shown.wait_for("Pronghorn is ready", limit_s)
    return running(pronghorn, name)
