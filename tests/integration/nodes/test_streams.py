"""A hand-over whose asker does not read: it waits alone, holds its blocks no longer than its time, and ends quietly."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from pipelines.node.stream_service import stream_handler
from pronghorn.wire import CLIENT_CHANNEL_OPTIONS, PREFILL_METHOD, SERVER_CHANNEL_OPTIONS

FRAME = bytes(1 << 20)
FRAMES = 64


class Sender:
    """Hand-overs of large frames, as a prefill node makes them."""

    def __init__(self) -> None:
        self.running = 0
        self.ended = asyncio.Event()

    async def frames(self, request: bytes) -> AsyncGenerator[bytes, None]:
        self.running += 1
        try:
            for _ in range(FRAMES):
                yield FRAME
        finally:
            self.running -= 1
            self.ended.set()


@asynccontextmanager
async def serving(sender: Sender) -> AsyncIterator[aio.Channel]:
    server = aio.server(options=SERVER_CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers([stream_handler(PREFILL_METHOD, sender.frames)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_CHANNEL_OPTIONS) as channel:
            yield channel
    finally:
        await server.stop(None)


async def begun(call: "aio.UnaryStreamCall[bytes, bytes]") -> None:
    assert isinstance(await call.read(), bytes)


@pytest.mark.parametrize("ending", ["cancelled", "out of time"])
async def test_an_asker_that_stops_reading_ends_in_no_fault(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender()
    async with asyncio.timeout(60.0), serving(sender) as channel:
        call = channel.unary_stream(PREFILL_METHOD)(b"", timeout=0.3 if ending == "out of time" else 5.0)
        await begun(call)
        if ending == "cancelled":
            call.cancel()
        await sender.ended.wait()
        await asyncio.sleep(0)
    assert sender.running == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_asker_that_does_not_read_holds_up_nobody_else() -> None:
    sender = Sender()
    async with asyncio.timeout(60.0), serving(sender) as channel:
        stalled = [channel.unary_stream(PREFILL_METHOD)(b"", timeout=5.0) for _ in range(4)]
        for call in stalled:
            await begun(call)
        other = channel.unary_stream(PREFILL_METHOD)(b"", timeout=5.0)
        received = 0
        while isinstance(await other.read(), bytes):
            received += 1
        assert received == FRAMES and sender.running == len(stalled)
        for call in stalled:
            call.cancel()
