"""The hand-over over gRPC: raw request in, raw frames out, one stream for the whole of it.

Knows the method and the stream. What the frames are is the node's to say. Leaving the generator, by its end or by
the cancellation of the call, is what frees the request's blocks.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from pipelines.node.session_service import MethodHandlers, method_handlers
from pronghorn.wire import PREFILL_METHOD

log = logging.getLogger(__name__)

READER_TIMEOUT_S = 10.0
"""A reader that takes no frame for this long loses the hand-over: it may answer pings for ever and hold our blocks."""

Frames = Callable[[bytes], AsyncGenerator[bytes, None]]


def prefill_handler(frames: Frames, reader_timeout_s: float = READER_TIMEOUT_S) -> MethodHandlers:
    """Serve `frames(request)` as the Prefill method. Flow control is its back-pressure."""

    async def prefill(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        await hand_over(frames(request), context.write, reader_timeout_s)

    return method_handlers((PREFILL_METHOD, grpc.unary_stream_rpc_method_handler(prefill)))


async def hand_over(
    frames: AsyncGenerator[bytes, None], write: Callable[[bytes], Awaitable[None]], reader_timeout_s: float
) -> None:
    """Write all `frames`; on return their generator is closed, whether its reader has taken them or not."""
    async with aclosing(frames) as stream:
        async for frame in stream:
            try:
                async with asyncio.timeout(reader_timeout_s):
                    await write(frame)
            except TimeoutError:
                log.warning("a hand-over was given up: its reader took nothing for %.1f s", reader_timeout_s)
                return
            except aio.BaseError as error:
                # The asker has gone, or its time is up, which is no fault of ours.
                log.debug("a hand-over ended before it was read: %s", error)
                return
