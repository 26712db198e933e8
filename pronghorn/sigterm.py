"""SIGTERM to a process whose main thread is Ray's, heard on the loop that serves instead of ending the process at once.

Only the main thread may say what a signal does, and in a worker Ray keeps it: its handler (2.60, `Worker.main_loop`)
calls one function, which it finds by name among the globals of its module, and which raises SystemExit. That name is
given another meaning here. Where SIGTERM is handled otherwise, nothing is changed.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

log = logging.getLogger(__name__)

ENDING = "raise_sys_exit_with_custom_error_message"


def hear_sigterm(loop: asyncio.AbstractEventLoop, heard: Callable[[], None]) -> bool:
    """Have `heard` called on `loop` at each SIGTERM; whether that could be arranged. From any thread."""
    namespace = getattr(signal.getsignal(signal.SIGTERM), "__globals__", {})
    if ENDING not in namespace:
        log.warning("SIGTERM will end this process without a drain: its handler is not Ray's")
        return False

    def instead(_message: str, exit_code: int = 0) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending
            loop.call_soon_threadsafe(heard)

    namespace[ENDING] = instead
    return True
