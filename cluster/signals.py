"""The signals that ask a cluster to end, and who acts on them.

From the moment a run is written until its supervisor can act, they are held back by the process's signal mask, which
survives the exec: whoever presses Ctrl-C then gets what a moment later would have got, and no folder stays.
"""

import signal
from collections.abc import Callable
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hold() -> None:
    """Until `release`, in this process or in the program that it becomes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def release() -> None:
    """One that came meanwhile is acted on before this returns."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """A handler: whatever runs is left by a KeyboardInterrupt."""
    raise KeyboardInterrupt


def listen(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` on each of them, but leave SIGHUP to `nohup` where that was used. A shell without job control
    starts its background jobs with SIGINT ignored; that is undone, since nobody means a cluster to be deaf."""
    for number in ENDING:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
