"""The hand-over over gRPC: raw request in, raw frames out, one stream for the whole of it.

Knows the method and the stream. What the frames are is the node's to say. Leaving the generator, by its end or by
the cancellation of the call, is what frees the request's blocks.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc import aio

from pipelines.node.session_service import MethodHandlers, method_handlers
from pronghorn.wire import PREFILL_METHOD

log = logging.getLogger(__name__)

Frames = Callable[[bytes], AsyncGenerator[bytes, None]]


def prefill_handler(frames: Frames) -> MethodHandlers:
    """Serve `frames(request)` as the Prefill method. Flow control is its back-pressure."""

    async def prefill(request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        async with aclosing(frames(request)) as stream:
            async for frame in stream:
                try:
                    await context.write(frame)
                except aio.BaseError as error:
                    # The asker has gone, or its time is up, which is no fault of ours.
                    log.debug("a hand-over ended before it was read: %s", error)
                    return

    return method_handlers((PREFILL_METHOD, grpc.unary_stream_rpc_method_handler(prefill)))
