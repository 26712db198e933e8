"""What a child process prints, logged line by line under its node's name; the last lines are kept for its obituary."""

import logging
import os
from collections import deque

log = logging.getLogger(__name__)

KEPT_LINES = 20
READ_BYTES = 1 << 16


class OutputLines:
    def __init__(self, fd: int, name: str) -> None:
        """`fd` is the reading end of the child's pipe; the caller keeps it."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._name = name
        self._partial = b""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def read(self) -> bool:
        """Log what is there. False where the pipe has ended, or has nothing now."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            text = line.decode(errors="replace")
            self._last.append(text)
            log.info("%s engine: %s", self._name, text)
        return bool(data)

    def drain(self) -> None:
        while self.read():
            pass

    def tail(self) -> str:
        """The last lines, on lines of their own; empty where nothing was printed."""
        return "".join(f"\n  {line}" for line in self._last)
