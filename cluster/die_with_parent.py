"""`python -m cluster.die_with_parent PID COMMAND...` becomes COMMAND, which the kernel ends when process PID ends.

Linux only (PR_SET_PDEATHSIG survives the exec); elsewhere it just becomes COMMAND, and `pronghorn down` cleans up.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def bound(command: list[str]) -> list[str]:
    """`command`, to be started by the calling process and to end with it."""
    return [sys.executable, "-P", "-m", "cluster.die_with_parent", str(os.getpid()), *command]


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before we asked to be told
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
