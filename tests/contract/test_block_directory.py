"""What every version of the directory of blocks does; then what the one in Redis does beyond it."""

import asyncio
import tempfile
import uuid
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvcache import directory, redis_directory
from kvcache.contents import CacheContents
from kvcache.directory import BlockDirectory
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, RunStored
from kvcache.memory_directory import MemoryDirectory
from kvcache.redis_directory import AT_ONCE, BYTES_PER_ENTRY, RedisDirectory
from pipelines.node.directory_publisher import DirectoryPublisher
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.errors import NodeRefused, Unavailable
from pronghorn.ids import Incarnation, NodeName
from pronghorn.tasks import Owner
from tests.fakes.valkey_server import ValkeyServer

HASHES = [BlockHash(bytes([n]) * 32) for n in range(1, 9)]
ONE, TWO = NodeName("decode-1"), NodeName("decode-2")
OLD, NEW, OTHER = (Incarnation(letter * 32) for letter in "abc")
ROOM = 10
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server():
    with tempfile.TemporaryDirectory(prefix="vk") as folder:
        running = ValkeyServer(Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.stop()


@pytest.fixture(params=["memory", "redis"])
async def made(request: pytest.FixtureRequest):
    if request.param == "memory":
        yield MemoryDirectory(SystemClock(), max_entries=ROOM)
        return
    server = request.getfixturevalue("server")
    found = RedisDirectory(server.url, uuid.uuid4().hex, ROOM * BYTES_PER_ENTRY)
    yield found
    await found.close()


async def test_a_life_is_found_as_deep_as_it_has_blocks_without_a_gap(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    await made.open(TWO, OTHER, 1.0)
    assert await made.stored(ONE, OLD, HASHES[:4]) == 4
    assert await made.stored(TWO, OTHER, [*HASHES[:2], HASHES[3]]) == 3
    assert await made.depths(HASHES) == {OLD: 4, OTHER: 2}
    assert await made.depths(HASHES[1:]) == {OLD: 3, OTHER: 1}
    assert await made.depths([HASHES[7]]) == {} and await made.depths([]) == {}


async def test_what_is_removed_is_found_no_more_and_twice_is_once(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    for _ in range(2):
        await made.stored(ONE, OLD, HASHES[:3])
    for _ in range(2):
        await made.removed(ONE, OLD, [HASHES[1]])
    assert await made.depths(HASHES) == {OLD: 1}
    assert await made.depths(HASHES[2:]) == {OLD: 1}


@pytest.mark.field("kthena#1223")
@pytest.mark.field("kthena#1428")
@pytest.mark.field("kthena#1463")
async def test_a_successor_gets_no_credit_for_what_its_predecessor_had_and_fences_it(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    await made.stored(ONE, OLD, HASHES[:3])
    await made.open(ONE, NEW, 1.001)
    assert await made.depths(HASHES) == {}
    for stale in (made.stored(ONE, OLD, HASHES), made.removed(ONE, OLD, HASHES), made.refresh(ONE, OLD)):
        with pytest.raises(NodeRefused) as refused:
            await stale
        assert refused.value.code == "superseded"
    with pytest.raises(NodeRefused):
        await made.open(ONE, OLD, 1.0)
    await made.leave(ONE, OLD)
    await made.stored(ONE, NEW, HASHES[:1])
    assert await made.depths(HASHES) == {NEW: 1}


async def test_who_opens_again_begins_with_nothing(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    await made.stored(ONE, OLD, HASHES[:3])
    await made.open(ONE, OLD, 1.0)
    assert await made.depths(HASHES) == {}


async def test_a_name_that_is_not_held_cannot_write(made: BlockDirectory) -> None:
    with pytest.raises(NodeRefused) as refused:
        await made.stored(ONE, OLD, HASHES)
    assert refused.value.code == "unknown"
    await made.open(ONE, OLD, 1.0)
    await made.leave(ONE, OLD)
    with pytest.raises(NodeRefused):
        await made.refresh(ONE, OLD)


async def test_rows_are_bounded_and_room_comes_back(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    await made.open(TWO, OTHER, 1.0)
    assert await made.stored(ONE, OLD, HASHES) == 8
    assert await made.stored(TWO, OTHER, HASHES) == 2
    assert await made.depths(HASHES) == {OLD: 8, OTHER: 2}
    await made.removed(ONE, OLD, HASHES[4:])
    assert await made.stored(TWO, OTHER, HASHES) == 6
    await made.leave(ONE, OLD)
    await made.refresh(TWO, OTHER)  # clears what the other has left
    assert await made.stored(TWO, OTHER, HASHES) == 8


async def test_rows_tell_everything_by_life(made: BlockDirectory) -> None:
    await made.open(ONE, OLD, 1.0)
    await made.open(TWO, OTHER, 1.0)
    await made.stored(ONE, OLD, HASHES[:3])
    await made.stored(TWO, OTHER, HASHES[:1])
    found: dict[str, set[bytes]] = {}
    async for life, keys in made.rows():
        found.setdefault(life, set()).update(keys)
    assert found == {OLD: {h[:16] for h in HASHES[:3]}, OTHER: {HASHES[0][:16]}}


async def test_a_life_that_says_nothing_more_counts_no_more(
    made: BlockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (directory, redis_directory, "kvcache.memory_directory"):
        monkeypatch.setattr(f"{module}.LEASE_S" if isinstance(module, str) else f"{module.__name__}.LEASE_S", 0.05)
    await made.open(ONE, OLD, 1.0)
    await made.stored(ONE, OLD, HASHES[:2])
    await asyncio.sleep(0.1)
    with pytest.raises(NodeRefused) as refused:
        await made.refresh(ONE, OLD)
    assert refused.value.code == "unknown" and await made.depths(HASHES) == {}


# --- in Redis ---------------------------------------------------------------------------------------------------------


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110  # a server's answer, which no event tells
            await asyncio.sleep(0.02)


async def test_a_publisher_heals_the_rows_after_a_flush_and_an_outage(server: ValkeyServer) -> None:
    found = RedisDirectory(server.url, uuid.uuid4().hex, 1 << 20)
    contents, owner = CacheContents(), Owner("publisher")
    publisher = DirectoryPublisher(found, ONE, OLD, 1.0, contents, Counters())

    def change(*changes) -> None:
        contents.apply(changes)
        publisher.note(changes)

    async def depth_is(expected: int) -> bool:
        try:
            return (await found.depths(HASHES)).get(OLD, 0) == expected
        except Unavailable:
            return False

    owner.start(publisher.run(), "run")
    try:
        change(RunStored(None, HASHES[:3]))
        await until(lambda: depth_is(3))
        async with Redis.from_url(server.url) as redis:
            await redis.flushall()
        await until(lambda: depth_is(3))
        change(AllRemoved(), RunStored(None, HASHES[:1]))
        await until(lambda: depth_is(1))
        server.stop()
        change(RunStored(HASHES[0], HASHES[1:5]))
        server.start()
        await until(lambda: depth_is(5))
    finally:
        await owner.stop(1.0)
        await publisher.leave()


async def test_what_a_dead_life_had_is_cleared_from_redis(server: ValkeyServer) -> None:
    prefix = uuid.uuid4().hex
    found = RedisDirectory(server.url, prefix, 1 << 20)
    await found.open(ONE, OLD, 1.0)
    await found.stored(ONE, OLD, HASHES)
    await found.open(ONE, NEW, 2.0)
    await found.refresh(ONE, NEW)
    async with Redis.from_url(server.url) as redis:
        assert not await redis.keys(f"{prefix}:dir:row:*") and not await redis.keys(f"{prefix}:dir:of:*")
        assert await found.entries() == int(await redis.get(f"{prefix}:dir:entries")) == 0
    await found.close()


async def test_who_read_a_number_before_a_flush_takes_nobody_for_its_life_after_it(server: ValkeyServer) -> None:
    prefix = uuid.uuid4().hex
    writer, reader = (RedisDirectory(server.url, prefix, 1 << 20) for _ in range(2))
    await writer.open(ONE, OLD, 1.0)
    await writer.stored(ONE, OLD, HASHES[:2])
    assert await reader.depths(HASHES) == {OLD: 2}
    async with Redis.from_url(server.url) as redis:
        await redis.delete(*await redis.keys(f"{prefix}:dir:*"))
    await writer.open(TWO, OTHER, 1.0)
    await writer.stored(TWO, OTHER, HASHES[:3])
    assert await reader.depths(HASHES) == {OTHER: 3}
    await writer.close()
    await reader.close()


async def test_a_server_that_has_lost_some_changes_of_a_life_knows_nothing_of_it(server: ValkeyServer) -> None:
    """As a replica that has taken over before it heard of everything: what it has is not what the life says."""
    found = RedisDirectory(server.url, prefix := uuid.uuid4().hex, 1 << 20)
    await found.open(ONE, OLD, 1.0)
    await found.stored(ONE, OLD, HASHES[:2])
    async with Redis.from_url(server.url) as redis:
        [(number, said)] = (await redis.hgetall(f"{prefix}:dir:said")).items()
        await found.removed(ONE, OLD, HASHES[1:2])
        await redis.hset(f"{prefix}:dir:said", number, said)
    for change in (lambda: found.refresh(ONE, OLD), lambda: found.stored(ONE, OLD, HASHES[3:])):
        with pytest.raises(NodeRefused) as refused:
            await change()
        assert refused.value.code == "unknown"
    await found.open(ONE, OLD, 1.0)
    await found.stored(ONE, OLD, HASHES[:1])
    await found.refresh(ONE, OLD)
    assert await found.depths(HASHES) == {OLD: 1}
    await found.close()


async def test_what_a_full_server_is_full_of_is_cleared_though_nothing_can_be_written() -> None:
    with tempfile.TemporaryDirectory(prefix="vk") as folder:
        server = ValkeyServer(Path(folder))
        server.start()
        found = RedisDirectory(server.url, "p", 1 << 20)
        await found.open(ONE, OLD, 1.0)
        await found.stored(ONE, OLD, HASHES)
        await found.open(ONE, NEW, 2.0)
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("maxmemory", 1)
            with pytest.raises(Unavailable):
                await found.refresh(ONE, NEW)
            assert not await redis.keys("p:dir:row:*")
        await found.close()
        server.stop()


async def test_a_directory_that_is_away_is_unavailable() -> None:
    found = RedisDirectory("redis://127.0.0.1:1", "p", 1 << 20)
    with pytest.raises(Unavailable):
        await found.depths(HASHES)
    await found.close()


async def test_a_burst_of_questions_leaves_few_connections(server: ValkeyServer) -> None:
    """Each that was ever opened stays, in every process of the cluster."""
    watching = Redis.from_url(server.url, decode_responses=True)
    before = len(await watching.client_list())
    found = RedisDirectory(server.url, uuid.uuid4().hex, ROOM * BYTES_PER_ENTRY)
    await asyncio.gather(*(found.depths(HASHES) for _ in range(200)))
    assert len(await watching.client_list()) - before <= AT_ONCE
    await found.close()
    await watching.aclose()
