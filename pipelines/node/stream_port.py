"""The ports through which a node reads streams from other nodes: gRPC, shared memory, or a test's own.

Knows frames; not what carries them.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvcache.transfer import Frame
from pipelines.types.frames import PrefillTarget


class FrameStream(Protocol):
    async def read(self) -> Frame | None:
        """The next frame; None at the end. Its blocks may be read until the next `read`, or the end of the stream.

        Raises a PronghornError where the stream breaks, or what came is no frame.
        """


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
