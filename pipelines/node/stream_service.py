"""A server stream of raw frames over gRPC: one raw request in, frames out. Hand-overs and fetches are such streams.

Knows the method and the stream. What the frames are is the node's to say. Leaving the generator, by its end or by the
cancellation of the call, is what frees what it holds.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

import grpc
from grpc import aio

from kvcache import transfer
from pipelines.node.session_service import MethodHandlers, method_handlers

log = logging.getLogger(__name__)

READER_TIMEOUT_S = 10.0
"""A reader that takes no frame for this long loses the hand-over: it may answer pings for ever and hold our blocks."""

Frames = Callable[[bytes], AsyncGenerator[bytes, None]]


class StreamMethod(NamedTuple):
    """A stream that a node serves, over gRPC and to nodes on its host."""

    name: str
    frames: Callable[..., AsyncGenerator[bytes, None]]
    """Of a request, and of `carriage`, the stream's `transfer.Carriage`."""
    limit_s: float | None = None
    """It is cut off after that long."""

    def handler(self, digest_of: transfer.Digest = transfer.block_digest) -> MethodHandlers:
        frames = partial(self.frames, carriage=transfer.in_frames(digest_of))
        return stream_handler(self.name, frames, limit_s=self.limit_s)


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
) -> bool:
    """Write all `frames`; on return their generator is closed. Whether its reader has taken them all."""
    async with aclosing(frames) as stream:
        async for frame in stream:
            try:
                async with asyncio.timeout(reader_timeout_s):
                    await write(frame)
            except TimeoutError:
                log.warning("a hand-over was given up: its reader took nothing for %.1f s", reader_timeout_s)
                return False
            except aio.BaseError as error:
                # The asker has gone, or its time is up, which is no fault of ours.
                log.debug("a stream ended before it was read: %s", error)
                return False
    return True
