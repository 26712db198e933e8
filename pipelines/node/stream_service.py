"""A server stream of raw frames over gRPC: one raw request in, frames out. Hand-overs and fetches are such streams.

Knows the method and the stream. What the frames are is the node's to say. Leaving the generator, by its end or by the
cancellation of the call, is what frees what it holds.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from pipelines.node.session_service import MethodHandlers, method_handlers

log = logging.getLogger(__name__)

READER_TIMEOUT_S = 10.0
"""A reader that takes no frame for this long loses the hand-over: it may answer pings for ever and hold our blocks."""

Frames = Callable[[bytes], AsyncGenerator[bytes, None]]


def stream_handler(
    method: str, frames: Frames, *, limit_s: float | None = None, reader_timeout_s: float = READER_TIMEOUT_S
) -> MethodHandlers:
    """Serve `frames(request)` as `method`, cut off after `limit_s`. Flow control is its back-pressure."""

    async def serve(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await hand_over(frames(request), context.write, reader_timeout_s)
        except TimeoutError:
            log.warning("a stream of %s was cut off after %s s", method, limit_s)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"cut off after {limit_s} s")

    return method_handlers((method, grpc.unary_stream_rpc_method_handler(serve)))


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
                log.debug("a stream ended before it was read: %s", error)
                return
