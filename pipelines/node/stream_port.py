"""The ports through which a node reads streams from other nodes: gRPC, shared memory, or a test's own.

Knows frames; not what carries them.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvcache.transfer import BlockReceiver, BlocksFrame, Frame
from pipelines.types.frames import PrefillTarget


class FrameStream(Protocol):
    async def read(self) -> Frame | None:
        """The next frame; None at the end. Blocks that are not taken before the next `read` are given up.

        Raises a PronghornError where the stream breaks, what came is no frame, or what was taken is not as it was sent.
        """

    def take(self, frame: BlocksFrame, receiver: BlockReceiver) -> None:
        """Have `receiver` take the frame that was read last: at once, or while the next ones are read, and then a
        commit comes after that. Nothing is written once the stream's context was left. Raises TransferFailed."""


class StreamPort(Protocol):
    def stream(
        self, target: PrefillTarget, request: bytes, timeout_s: float
    ) -> AbstractAsyncContextManager[FrameStream]:
        """Open a stream; leaving the context cancels it."""

    def channels(self) -> list[str]:
        """The addresses to which connections are open."""

    async def close_idle(self) -> None:
        """Give up the connections that have carried nothing for a while."""

    async def close(self) -> None: ...
