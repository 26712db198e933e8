"""What ends a request from outside: its client leaves, its time is over. Both become errors of the tree.

Each is a context that cancels its body, so that whatever the body holds is released on the way out.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from pronghorn.clock import Clock
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded
from pronghorn.tasks import Owner


class ClientGone(Cancelled):
    def __init__(self) -> None:
        super().__init__("the client has gone")


@asynccontextmanager
async def while_client_stays(receive: Receive, owner: Owner, name: str) -> AsyncIterator[None]:
    """Cancel the body the moment `http.disconnect` arrives and raise ClientGone. Use it once the request was read."""
    body = asyncio.current_task()
    assert body is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        body.cancel()

    watcher = owner.start(watch(), f"disconnect of {name}")
    try:
        yield
    except asyncio.CancelledError:
        # Somebody else's cancellation (a stopping server) goes on as it is.
        if left and body.uncancel() == 0:
            raise ClientGone() from None
        raise
    finally:
        watcher.cancel()


@asynccontextmanager
async def before(deadline: Deadline, clock: Clock) -> AsyncIterator[None]:
    """Cancel the body when the deadline passes and raise DeadlineExceeded."""
    timer = asyncio.timeout(deadline.remaining_s(clock.now_s()))
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded("the request's deadline passed while it was generated") from None
