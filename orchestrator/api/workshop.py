"""Where bodies are prepared: short ones in place, the others off the event loop, with a bound on how many may wait."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from orchestrator.api.preparation import Arrival
from orchestrator.api.settings import ApiSettings
from pronghorn.errors import DeadlineExceeded, Overloaded

_COMPILED = re.compile(rb'"(response_format|tools|format)"|\\u00[4-7]')
"""Names of fields whose values are compiled; or an escape of a letter, behind which such a name might hide."""

Made = TypeVar("Made")


class Workshop:
    """Runs preparations: short ones in place, long ones in a few threads, in the order in which they came; those with
    a grammar to compile in a thread of their own, so that a costly one holds up no other kind."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.preparing_threads, thread_name_prefix="prepare")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._waiting = 0

    async def prepare(self, make: Callable[[bytes, Arrival], Made], raw: bytes, arrival: Arrival) -> Made:
        """Raises Overloaded where too many wait, DeadlineExceeded for a wait beyond any request's time, and what
        `make` raises."""
        compiles = _COMPILED.search(raw) is not None
        if len(raw) <= self._settings.offload_bytes and not compiles:
            return make(raw, arrival)
        if self._waiting >= self._settings.max_preparing:
            raise Overloaded(
                f"{self._waiting} requests wait to be tokenised, which is the most that may",
                retry_after_s=self._settings.retry_after_s,
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._settings.default_deadline_s):
                threads = self._compiling if compiles else self._threads
                return await asyncio.get_running_loop().run_in_executor(threads, make, raw, arrival)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while its body was prepared") from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)
