"""A hand-over's stream, whoever reads it: its generator is closed, and with it its blocks freed, on every way out."""

import asyncio
from collections.abc import AsyncGenerator

from grpc import aio

from pipelines.node.stream_service import hand_over


class Source:
    def __init__(self) -> None:
        self.given = 0
        self.closed = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(3):
                self.given += 1
                yield bytes([number])
        finally:
            self.closed = True


async def test_a_reader_gets_every_frame() -> None:
    source, read = Source(), []

    async def write(frame: bytes) -> None:
        read.append(frame)

    await hand_over(source.frames(), write, 5.0)
    assert read == [b"\0", b"\1", b"\2"] and source.closed


async def test_a_reader_that_takes_nothing_loses_the_hand_over() -> None:
    source = Source()

    async def write(frame: bytes) -> None:
        await asyncio.Event().wait()

    await hand_over(source.frames(), write, 0.01)
    assert source.given == 1 and source.closed


async def test_a_reader_that_has_gone_ends_it() -> None:
    source = Source()

    async def write(frame: bytes) -> None:
        raise aio.UsageError("the call is over")

    await hand_over(source.frames(), write, 5.0)
    assert source.given == 1 and source.closed
