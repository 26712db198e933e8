"""The kernel's own end of a process that may have no more memory: a memory cgroup of its own with no room.

What the process has stays accounted where it was; the first page that it asks for anew is one too many, and the kernel
kills it as it kills whatever a container's limit is exceeded by. Needs root and a memory controller, of version 1 or 2.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from pronghorn.errors import Unavailable

MOUNTED = Path("/sys/fs/cgroup")
LIMIT_BYTES = 1 << 16
REMOVED_S = 5.0


class MemoryCgroup:
    """Raises Unavailable where there can be none."""

    def __init__(self, name: str, mounted: Path = MOUNTED) -> None:
        self._parent, self._limit, self._told = _controller(mounted)
        self._path = self._parent / name
        try:
            self._path.mkdir()
            (self._path / self._limit).write_text(str(LIMIT_BYTES))
        except OSError as error:
            self.remove()
            raise Unavailable(f"no memory cgroup can be made: {error}") from None

    def take(self, pid: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How many of its processes the kernel has killed for their memory."""
        lines = (line.split() for line in (self._path / self._told).read_text().splitlines())
        return sum(int(count) for name, count in lines if name == "oom_kill")

    def remove(self) -> None:
        """What it has not ended is let go; what is on its way out is waited for."""
        with suppress(OSError):
            for pid in (self._path / "cgroup.procs").read_text().split():
                (self._parent / "cgroup.procs").write_text(pid)
        give_up_s = time.monotonic() + REMOVED_S
        while self._path.exists() and time.monotonic() < give_up_s:
            with suppress(OSError):
                return self._path.rmdir()
            time.sleep(0.01)  # the kernel tells nobody when the last one has left


def why_not(mounted: Path = MOUNTED) -> str | None:
    """Why this machine grants none; None where it does."""
    try:
        _controller(mounted)
    except Unavailable as error:
        return error.message
    return None if os.geteuid() == 0 else "a memory cgroup needs root"


def _controller(mounted: Path) -> tuple[Path, str, str]:
    """Where cgroups are made, and the files of a limit and of what was done about it. Raises Unavailable."""
    if (mounted / "memory" / "memory.limit_in_bytes").exists():
        return mounted / "memory", "memory.limit_in_bytes", "memory.oom_control"
    granted = mounted / "cgroup.subtree_control"
    if granted.exists() and "memory" in granted.read_text().split():
        return mounted, "memory.max", "memory.events"
    raise Unavailable(f"a memory cgroup needs a memory controller below {mounted}")
