"""Blocks from another node, from the asker's side: one stream, checked, written where the engine will read.

Knows the order of a fetch's messages and the bound on silence; not why the blocks are wanted. Invariants: the holder's
hello is checked before anything is written; only what was asked for is written, each block once, and counts only with
its digest; a fetch that breaks keeps what it brought up to the first gap; nothing is written after `fetch` has ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import assert_never

from google.protobuf.message import DecodeError

from kvcache import fetch, transfer
from kvcache.dkv_connector import Fetched
from kvcache.fetch import Declined, FetchRequest, Opened, Stock
from kvcache.handshake import Identity, check_peer
from kvcache.hashing import BlockHash
from kvcache.registry import NodeRecord
from pipelines.node.stream_port import FrameStream, StreamPort
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import Clock
from pronghorn.errors import HandshakeRefused, NodeLost, PronghornError, TransferFailed, from_record
from protos import node_pb2

STALL_TIMEOUT_S = 3.0
"""A holder that says nothing for this long has failed; it speaks every 0.3 s."""


class FetchClient:
    """`kvcache.dkv_connector.BlockSource`."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        streams: StreamPort,
        clock: Clock,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._identity = identity
        self._streams = streams
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s

    async def fetch(
        self,
        holder: NodeRecord,
        hashes: Sequence[BlockHash],
        destinations: Sequence[memoryview],
        budget_s: float,
        patience_s: float,
    ) -> Fetched:
        target = PrefillTarget(holder.name, holder.address, holder.incarnation)
        request = FetchRequest(self._identity(), holder.incarnation, list(hashes), budget_s, patience_s)
        receiving = _Receiving(destinations, self._clock)
        failure: str | None = None
        try:
            async with self._streams.stream(target, request.to_bytes(), budget_s) as stream:
                await self._receive(stream, target, receiving)
        except PronghornError as error:
            failure = error.code
        receiver = receiving.receiver
        return Fetched(receiver.leading, receiver.received_bytes, receiving.took_s, failure)

    async def _receive(self, stream: FrameStream, target: PrefillTarget, receiving: "_Receiving") -> None:
        opened = False
        while True:
            match await self._next_frame(stream, target):
                case transfer.MessageFrame(payload=payload):
                    match fetch.decode(payload):
                        case Opened(hello=hello) if not opened:
                            self._check(hello, target)
                            opened = True
                        case Stock():
                            pass  # a sign of life; what it promises is seen when it comes
                        case Declined(error=error):
                            raise from_record(error)
                        case Opened():
                            raise TransferFailed("a second hello came in one fetch", code="malformed")
                        case never:
                            assert_never(never)
                case transfer.BlocksFrame() as blocks:
                    if not opened:
                        raise HandshakeRefused(f"{target.name} began with blocks, not with its hello")
                    receiving.came()
                    stream.take(blocks, receiving.receiver)
                case transfer.CommitFrame() as commit:
                    receiving.receiver.commit_what_came(commit)
                    if receiving.receiver.leading == receiving.wanted:  # else the holder may have waited for more
                        receiving.came()
                    return
                case frame:
                    assert_never(frame)

    def _check(self, hello: bytes, target: PrefillTarget) -> None:
        try:
            theirs = Identity.from_hello(node_pb2.Hello.FromString(hello))
        except DecodeError as error:
            raise HandshakeRefused(f"{target.name} sent a hello that cannot be read") from error
        check_peer(self._identity(), theirs, expect_incarnation=target.incarnation)

    async def _next_frame(self, stream: FrameStream, target: PrefillTarget) -> transfer.Frame:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                frame = await stream.read()
        except TimeoutError as error:
            raise NodeLost(f"{target.name} said nothing for {self._stall_timeout_s} s", code="stalled") from error
        if frame is None:
            raise TransferFailed(f"{target.name} ended a fetch before its commit", code="incomplete")
        return frame


class _Receiving:
    """The blocks that have come, and how long bytes took to come."""

    def __init__(self, destinations: Sequence[memoryview], clock: Clock) -> None:
        self.receiver = transfer.BlockReceiver(dict(enumerate(destinations)))
        self.wanted = len(destinations)
        self.took_s = 0.0
        self._clock = clock
        self._asked_s = clock.now_s()

    def came(self) -> None:
        """Time in which the holder only computed is not the link's: each frame counts from the one before it, the first
        from the question, at most `_FRAME_S` each."""
        now_s = self._clock.now_s()
        self.took_s += min(now_s - self._asked_s, _FRAME_S)
        self._asked_s = now_s


_FRAME_S = 1.0
