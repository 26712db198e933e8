"""The time that a leaving node gives to what it runs.

Knows one wait and its end. Whoever asks again, Serve after an operator or the other way round, may shorten it and
never lengthens it, so that everyone who waits for the node is right about the longest that it can take.
"""

import asyncio
import math
from collections.abc import Awaitable


class Grace:
    def __init__(self) -> None:
        self._until_s = math.inf
        self._limit: asyncio.Timeout | None = None

    def within(self, grace_s: float) -> None:
        """End the wait in `grace_s` from now, unless it ends sooner already."""
        self._until_s = min(self._until_s, asyncio.get_running_loop().time() + grace_s)
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._until_s)

    async def wait(self, rest: Awaitable[None]) -> bool:
        """Whether `rest` came in time. Once."""
        try:
            async with asyncio.timeout_at(self._until_s) as self._limit:
                await rest
        except TimeoutError:
            return False
        finally:
            self._limit = None
        return True
