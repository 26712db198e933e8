"""The pieces of several sequences of one request, in the order in which they come.

One sequence that fails fails them all: the others are cancelled. One sequence alone costs nothing here.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from orchestrator.api.choice import Piece
from pronghorn.errors import PronghornError
from pronghorn.tasks import Owner

_WAITING_PIECES_EACH = 4
_STOP_GRACE_S = 5.0


def merged(streams: Sequence[AsyncGenerator[Piece, None]], choices_each: int = 1) -> AsyncGenerator[Piece, None]:
    """Ends when every choice of every stream has given its last piece. Closing it closes them all."""
    return streams[0] if len(streams) == 1 else _merge(streams, len(streams) * choices_each)


async def _merge(streams: Sequence[AsyncGenerator[Piece, None]], open_choices: int) -> AsyncGenerator[Piece, None]:
    waiting: asyncio.Queue[Piece | BaseException] = asyncio.Queue(_WAITING_PIECES_EACH * len(streams))

    def fail(_: str, error: BaseException) -> None:
        while not waiting.empty():  # the pieces before it no longer matter; the error must find room
            waiting.get_nowait()
        waiting.put_nowait(error)

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    await waiting.put(piece)
        except PronghornError as error:
            await waiting.put(error)

    owner = Owner("prompts of one request", on_failure=fail)
    for index, stream in enumerate(streams):
        owner.start(pump(stream), str(index))
    try:
        while open_choices:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            open_choices -= item.finish_reason is not None
            yield item
    finally:
        await owner.stop(_STOP_GRACE_S)
