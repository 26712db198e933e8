"""Whoever finds a node's local socket and misuses it: it ends alone, and what it held up goes on."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
import pytest

from kvcache import transfer
from kvcache.memory import BlockMemory
from kvcache.transfer import Carriage
from pipelines.node import local_connection
from pipelines.node.local_server import LocalServer, Open
from pipelines.node.stream_service import StreamMethod
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, new_incarnation
from pronghorn.wire import FETCH_METHOD

pytestmark = pytest.mark.skipif(not local_connection.SUPPORTED, reason="shared memory between nodes is Linux's")

PATIENCE_S = 60.0


class Served:
    def __init__(self, reader_timeout_s: float = 5.0) -> None:
        self.memory = BlockMemory.create(8, 4096)
        self.ended = asyncio.Event()
        self.incarnation: Incarnation = new_incarnation()
        method = StreamMethod(FETCH_METHOD, self.frames)
        self.server = LocalServer(self.incarnation, [method], self.memory, Counters(), reader_timeout_s)

    async def frames(self, request: bytes, carriage: Carriage) -> AsyncGenerator[bytes, None]:
        sent: dict[int, bytes] = {}
        try:
            for frame in carriage.encode(((b, self.memory.block(b)) for b in range(8)), sent):
                yield frame
            yield transfer.encode_commit(sent)
        finally:
            self.ended.set()

    def connect(self) -> socket.socket:
        connected = local_connection.connect(self.incarnation)
        assert connected is not None
        return connected


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served(reader_timeout_s=0.2)
    async with asyncio.timeout(PATIENCE_S):
        yield served
    await served.server.stop()


def message(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


OPEN = message(msgspec.msgpack.encode(Open(FETCH_METHOD, b"", False)))


async def read_to_the_end(connected: socket.socket) -> bytes:
    found = b""
    while data := await asyncio.get_running_loop().sock_recv(connected, 1 << 16):
        found += data
    return found


@pytest.mark.parametrize(
    "sent",
    [
        message(b"\xff\xff garbage"),
        message(msgspec.msgpack.encode(Open("/pronghorn.Node/Nothing", b"", False))),
        struct.pack("<I", 1 << 31),
        OPEN + message(b"no acknowledgement"),
    ],
    ids=["garbage", "an unknown method", "a huge message", "a word in the midst"],
)
async def test_nonsense_ends_its_connection_and_no_other(served: Served, sent: bytes) -> None:
    with served.connect() as wrong:
        await asyncio.get_running_loop().sock_sendall(wrong, sent)
        await read_to_the_end(wrong)
    with served.connect() as right:
        await asyncio.get_running_loop().sock_sendall(right, OPEN + message(b""))
        right.settimeout(0)
        head = await asyncio.get_running_loop().sock_recv(right, 8)
        assert head[4:6] == b"PT"


async def test_an_asker_that_takes_nothing_holds_the_blocks_no_longer_than_its_time(served: Served) -> None:
    with served.connect() as silent:
        await asyncio.get_running_loop().sock_sendall(silent, OPEN)
        await served.ended.wait()
        assert b"PT" in await read_to_the_end(silent)


async def test_a_connection_that_says_nothing_costs_no_more_than_itself(served: Served) -> None:
    with served.connect(), served.connect() as other:
        await asyncio.get_running_loop().sock_sendall(other, OPEN)
        await served.ended.wait()


async def test_after_a_stop_nobody_answers_and_the_name_is_free(served: Served) -> None:
    await served.server.stop()
    assert local_connection.connect(served.incarnation) is None
    local_connection.listen(served.incarnation).close()


async def test_two_nodes_cannot_listen_under_one_name(served: Served) -> None:
    with pytest.raises(OSError):
        local_connection.listen(served.incarnation)
