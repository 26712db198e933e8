"""Sixty-four fetches at once: small blocks leave in large frames, as raw bytes, and each frame is where they are read.

No word of speed: `python -m bench.transfer` prints the rates, 64 streams among them (docs/transfer.md).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcache import transfer
from kvcache.fetch import FetchRequest
from kvcache.handshake import Identity
from kvcache.hashing import BlockHash
from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory
from pipelines.node.fetch_service import MAX_LEASES, FetchService
from pipelines.node.session_service import grpc_server
from pipelines.node.stream_client import StreamClient
from pipelines.node.stream_service import StreamMethod
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.ids import NodeName, new_incarnation
from pronghorn.wire import FETCH_METHOD

KIB = 1 << 10
TRANSFERS = 64
PATIENCE_S = 60.0
LAYOUTS = {
    "64 KiB": KVLayout("narrow", "bfloat16", block_tokens=16, num_layers=16, num_kv_heads=1, head_dim=64),
    "360 KiB": KVLayout("smollm2-135m", "bfloat16", block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64),
}
"""By what a block of 16 tokens takes."""


class Holder:
    """A node's own service of fetches over a memory full of random blocks. Its engine lends all of them to anybody, as
    soon as sixty-four have asked."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.memory = BlockMemory.create(num_blocks, layout.block_bytes)
        random = Random(20261)
        for block in range(num_blocks):
            self.memory.block(block)[:] = random.randbytes(layout.block_bytes)
        self.identity = Identity("decode", "holder", new_incarnation(), layout.model, layout.fingerprint())
        self.all_asked = asyncio.Barrier(TRANSFERS)
        link = SimpleNamespace(memory=self.memory, quiet_s=0.0)
        engine: Any = (self, link)
        self.service = FetchService(lambda: self.identity, lambda: None, *engine, SystemClock(), Counters())

    @asynccontextmanager
    async def lease(self, hashes: Sequence[BlockHash]) -> AsyncIterator[SimpleNamespace]:
        await self.all_asked.wait()
        assert self.service.open == TRANSFERS == MAX_LEASES
        yield SimpleNamespace(blocks=list(range(len(hashes))), coming=0)

    def frames(self, request: bytes, carriage: transfer.Carriage) -> AsyncGenerator[bytes, None]:
        return self.service.frames(request, carriage)

    def request(self, num_blocks: int) -> bytes:
        hashes = [BlockHash(bytes([block]) * 32) for block in range(num_blocks)]
        return FetchRequest(self.identity, self.identity.incarnation, hashes, PATIENCE_S, 0.0).to_bytes()


@pytest.mark.field("sglang#5450", "tensorflow#6256")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
async def test_blocks_of_sixty_four_transfers_at_once_leave_raw_and_in_large_frames(layout: KVLayout) -> None:
    """sglang#5450: many copies of a page each were slow; tensorflow#6256: tensors wrapped in protobuf were slower."""
    num_blocks = 2048 * KIB // layout.block_bytes
    holder = Holder(layout, num_blocks)
    server = grpc_server()
    server.add_generic_rpc_handlers([StreamMethod(FETCH_METHOD, holder.frames).handler()])
    target = PrefillTarget(
        NodeName("holder"), f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", new_incarnation()
    )
    client = StreamClient(FETCH_METHOD, SystemClock(), PATIENCE_S, connections=4)

    async def one() -> list[tuple[int, int, int]]:
        pool = BlockMemory.create(num_blocks, layout.block_bytes)
        receiver = transfer.BlockReceiver({block: pool.block(block) for block in range(num_blocks)})
        frames = []
        async with client.stream(target, holder.request(num_blocks), PATIENCE_S) as stream:
            assert isinstance(await stream.read(), transfer.MessageFrame)
            while not receiver.committed:
                match await stream.read():
                    case transfer.BlocksFrame(pieces=pieces) as frame:
                        (data,) = {piece.data.obj for piece in pieces}
                        frames.append((len(pieces), sum(len(piece.data) for piece in pieces), len(cast("bytes", data))))
                        stream.take(frame, receiver)
                    case transfer.CommitFrame() as commit:
                        receiver.commit(commit)
                    case other:
                        assert isinstance(other, transfer.MessageFrame)
        assert all(pool.block(block) == holder.memory.block(block) for block in range(num_blocks))
        return frames

    await server.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            transfers = await asyncio.gather(*(one() for _ in range(TRANSFERS)))
    finally:
        await client.close()
        await server.stop(None)
    for pieces, payload, frame in (told for frames in transfers for told in frames):
        assert 256 * KIB <= payload <= 1536 * KIB
        assert frame - payload == 8 + 32 * pieces, "beside the blocks' own bytes, a header for each"
    assert all(sum(payload for _, payload, _ in frames) == num_blocks * layout.block_bytes for frames in transfers)
