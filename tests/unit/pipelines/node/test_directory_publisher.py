"""On virtual time, over the directory in memory behind a wire that takes a while."""

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from cluster.simulator.virtual_loop import VirtualLoop
from kvcache.contents import CacheContents
from kvcache.directory import LEASE_S
from kvcache.hashing import BlockHash
from kvcache.journal import RunStored
from kvcache.memory_directory import MemoryDirectory
from pipelines.node.directory_publisher import MAX_WAITING_BLOCKS, DirectoryPublisher
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName

NAME = NodeName("decode-1")
LIFE = Incarnation("a" * 32)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(1))
    yield loop
    loop.close()


class LoopClock:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class FarDirectory(MemoryDirectory):
    """Each batch of rows takes `takes_s`. Counts how often it was begun anew."""

    def __init__(self, loop: VirtualLoop, takes_s: float) -> None:
        super().__init__(LoopClock(loop))
        self._takes_s = takes_s
        self.opened = 0
        self.writing = 0
        self.left_while_writing = 0

    async def open(self, name, incarnation, registered_at_unix_s) -> None:
        self.opened += 1
        await super().open(name, incarnation, registered_at_unix_s)

    async def stored(self, name, incarnation, hashes) -> int:
        self.writing += 1
        try:
            await asyncio.sleep(self._takes_s)
            return await super().stored(name, incarnation, hashes)
        finally:
            self.writing -= 1

    async def leave(self, name, incarnation) -> None:
        self.left_while_writing += self.writing
        await super().leave(name, incarnation)


def hashes(first: int, count: int) -> list[bytes]:
    return [BlockHash(number.to_bytes(16, "big") * 2) for number in range(first, first + count)]


class Node:
    def __init__(self, directory: FarDirectory, blocks: int) -> None:
        self.contents = CacheContents()
        self.contents.apply([RunStored(None, hashes(0, blocks))])
        self.counters = Counters()
        self.publisher = DirectoryPublisher(directory, NAME, LIFE, 1.0, self.contents, self.counters)
        self._stored = blocks

    def store(self) -> None:
        change = RunStored(None, hashes(self._stored, 1))
        self._stored += 1
        self.contents.apply([change])
        self.publisher.note([change])


async def rows(directory: FarDirectory) -> int:
    return sum([len(keys) async for _, keys in directory.rows()])


def test_a_pool_larger_than_what_may_wait_is_written_while_it_changes(loop: VirtualLoop) -> None:
    blocks, changes = 2 * MAX_WAITING_BLOCKS, 20

    async def play() -> None:
        directory = FarDirectory(loop, takes_s=0.001)
        node = Node(directory, blocks)
        writing = loop.create_task(node.publisher.run())
        for _ in range(changes):
            await asyncio.sleep(0.05)
            node.store()
        await asyncio.sleep(2.0)
        writing.cancel()
        assert directory.opened == 1 and node.counters.value("directory_overflow") == 0
        assert await rows(directory) == blocks + changes

    loop.run_until_complete(play())


@pytest.mark.parametrize("batches", [200, 12], ids=["much", "slowly"])
def test_the_name_is_held_while_more_is_written_than_a_lease_has_time_for(loop: VirtualLoop, batches: int) -> None:
    blocks = 256 * batches

    async def play() -> None:
        directory = FarDirectory(loop, takes_s=2 * LEASE_S / batches)
        node = Node(directory, blocks)
        writing = loop.create_task(node.publisher.run())
        await asyncio.sleep(3 * LEASE_S)
        writing.cancel()
        assert directory.opened == 1
        assert await rows(directory) == blocks

    loop.run_until_complete(play())


def test_changes_that_outrun_the_directory_end_in_everything_written_anew(loop: VirtualLoop) -> None:
    async def play() -> None:
        directory = FarDirectory(loop, takes_s=0.01)
        node = Node(directory, 0)
        writing = loop.create_task(node.publisher.run())
        await asyncio.sleep(1.0)
        change = RunStored(None, hashes(10, MAX_WAITING_BLOCKS + 500))
        for _ in range(4):  # the same again and again: what waits outgrows what there is
            node.contents.apply([change])
            node.publisher.note([change])
        assert node.counters.value("directory_overflow") > 0
        await asyncio.sleep(30.0)
        writing.cancel()
        assert directory.opened == 2 and await rows(directory) == len(node.contents)

    loop.run_until_complete(play())


@pytest.mark.parametrize("takes_s", [0.5, 1000.0], ids=["slowly", "never"])
def test_a_node_that_leaves_writes_nothing_more(loop: VirtualLoop, takes_s: float) -> None:
    async def play() -> None:
        directory = FarDirectory(loop, takes_s)
        node = Node(directory, 1000)
        writing = loop.create_task(node.publisher.run())
        await asyncio.sleep(0.1)
        assert directory.writing == 1
        left_at_s = loop.time()
        await node.publisher.leave()
        assert writing.done() and directory.left_while_writing == 0
        assert loop.time() - left_at_s < 1.1
        await asyncio.sleep(2 * LEASE_S)
        assert directory.opened == 1 and await rows(directory) == 0

    loop.run_until_complete(play())
