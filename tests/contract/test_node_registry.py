"""What every version of the node registry does; then what the one in Redis does beyond it."""

import asyncio
import tempfile
import time
import uuid
from contextlib import aclosing, contextmanager
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from kvcache.memory_registry import MemoryRegistry
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord, NodeRegistry, OrchestratorRecord
from pronghorn.clock import ManualClock, SystemClock
from pronghorn.errors import ConfigurationError, NodeRefused, Unavailable
from tests.fakes.valkey_server import ValkeyServer

LONG_S = 60.0
SHORT_S = 0.05
OLD = NodeRecord(
    name="decode-1",
    role="decode",
    model="smol",
    address="127.0.0.1:4000",
    incarnation="a" * 32,
    layout={"dtype": "float32"},
    seed_digest="5eed",
    load={"running": 2, "busy": 0.5},
    host="box",
    pid=7,
    registered_at_unix_s=1_800_000_000.123456,
)
NEW = msgspec.structs.replace(OLD, incarnation="b" * 32, registered_at_unix_s=OLD.registered_at_unix_s + 1e-3)
ORCHESTRATOR = OrchestratorRecord(
    models=["m", "org/n"],
    name="orchestrator-1",
    model="smol",
    incarnation="d" * 32,
    operations_address="127.0.0.1:4001",
    host="box",
    pid=8,
    registered_at_unix_s=1_800_000_000.5,
)
OTHER = msgspec.structs.replace(OLD, name="alpha", role="prefill", incarnation="c" * 32)


@contextmanager
def running_server():
    with tempfile.TemporaryDirectory(prefix="vk") as folder:
        server = ValkeyServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def valkey():
    with running_server() as server:
        yield server


@pytest.fixture
def prefix():
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "redis"])
async def registry(request):
    if request.param == "memory":
        made: NodeRegistry = MemoryRegistry(SystemClock())
    else:
        made = RedisRegistry(request.getfixturevalue("valkey").url, request.getfixturevalue("prefix"))
    yield made
    await made.close()


async def soon(waiting, limit_s=5.0):
    return await asyncio.wait_for(waiting, limit_s)


async def test_registered_nodes_are_listed_by_name_with_everything_they_said(registry):
    assert await registry.list() == []
    await registry.register(OLD, LONG_S)
    await registry.register(OTHER, LONG_S)
    assert await registry.list() == [OTHER, OLD]


async def test_orchestrators_are_listed_apart_from_the_nodes(registry):
    await registry.register(OLD, LONG_S)
    await registry.orchestrators.register(ORCHESTRATOR, LONG_S)
    namesake = msgspec.structs.replace(ORCHESTRATOR, name=OLD.name)
    await registry.orchestrators.register(namesake, LONG_S)
    assert await registry.list() == [OLD]
    assert await registry.orchestrators.list() == [namesake, ORCHESTRATOR]
    await registry.orchestrators.deregister(OLD.name, namesake.incarnation)
    assert await registry.list() == [OLD]
    assert await registry.orchestrators.list() == [ORCHESTRATOR]


async def test_an_orchestrators_row_ends_with_its_lease_or_its_newer_life(registry):
    rows = registry.orchestrators
    later = msgspec.structs.replace(ORCHESTRATOR, incarnation="e" * 32, registered_at_unix_s=1_800_000_001.0)
    await rows.register(later, LONG_S)
    with pytest.raises(NodeRefused, match="newer incarnation"):
        await rows.register(ORCHESTRATOR, LONG_S)
    await rows.deregister(ORCHESTRATOR.name, ORCHESTRATOR.incarnation)
    assert await rows.list() == [later]
    await rows.register(later, SHORT_S)
    async with asyncio.timeout(60.0):
        while await rows.list():  # noqa: ASYNC110  (no change of theirs is announced)
            await asyncio.sleep(SHORT_S)


async def test_orchestrators_that_come_and_go_wake_nobody_who_watches_the_nodes(registry):
    async with aclosing(registry.changes()) as changes:
        await soon(anext(changes))
        await registry.orchestrators.register(ORCHESTRATOR, LONG_S)
        await registry.orchestrators.deregister(ORCHESTRATOR.name, ORCHESTRATOR.incarnation)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(changes), 0.2)


async def test_a_refresh_replaces_what_was_said(registry):
    await registry.register(OLD, LONG_S)
    busier = msgspec.structs.replace(OLD, load={"running": 9})
    await registry.register(busier, LONG_S)
    assert await registry.list() == [busier]


async def test_a_lease_that_runs_out_removes_the_node_and_wakes_the_watcher(registry):
    async with aclosing(registry.changes()) as changes:
        await soon(anext(changes))
        await registry.register(OLD, SHORT_S)
        while await registry.list():
            await soon(anext(changes))


async def test_a_lapse_is_noticed_although_nobody_lists(registry):
    await registry.register(OLD, SHORT_S)
    async with aclosing(registry.changes()) as changes:
        await soon(anext(changes))
        await soon(anext(changes))
    assert await registry.list() == []


async def test_a_refresh_keeps_the_lease_alive(registry):
    await registry.register(OLD, SHORT_S)
    await registry.register(OLD, LONG_S)
    await registry.register(OTHER, SHORT_S)
    async with aclosing(registry.changes()) as changes:
        while len(await registry.list()) > 1:
            await soon(anext(changes))
    assert await registry.list() == [OLD]


async def test_a_newer_incarnation_takes_the_name_over(registry):
    await registry.register(OLD, LONG_S)
    await registry.register(NEW, LONG_S)
    assert await registry.list() == [NEW]


async def test_an_older_incarnation_cannot_take_the_name_back(registry):
    await registry.register(NEW, LONG_S)
    with pytest.raises(NodeRefused, match=NEW.incarnation, check=lambda error: error.code == "superseded"):
        await registry.register(OLD, LONG_S)
    assert await registry.list() == [NEW]


async def test_of_two_incarnations_as_old_as_each_other_the_first_stays(registry):
    twin = msgspec.structs.replace(NEW, registered_at_unix_s=OLD.registered_at_unix_s)
    await registry.register(OLD, LONG_S)
    with pytest.raises(NodeRefused):
        await registry.register(twin, LONG_S)


async def test_a_name_is_free_again_when_its_lease_has_run_out(registry):
    await registry.register(NEW, SHORT_S)
    async with aclosing(registry.changes()) as changes:
        while await registry.list():
            await soon(anext(changes))
    await registry.register(OLD, LONG_S)
    assert await registry.list() == [OLD]


async def test_only_its_own_incarnation_deregisters_a_node(registry):
    await registry.register(NEW, LONG_S)
    await registry.deregister(OLD.name, OLD.incarnation)
    await registry.deregister("nobody", OLD.incarnation)
    assert await registry.list() == [NEW]
    await registry.deregister(NEW.name, NEW.incarnation)
    await registry.deregister(NEW.name, NEW.incarnation)
    assert await registry.list() == []


async def test_a_watcher_wakes_for_arrivals_and_departures_but_not_for_load(registry):
    async with aclosing(registry.changes()) as changes:
        await soon(anext(changes))
        await registry.register(OLD, LONG_S)
        await soon(anext(changes))
        await registry.register(NEW, LONG_S)
        await soon(anext(changes))
        await registry.register(msgspec.structs.replace(NEW, load={"running": 5}), LONG_S)
        with pytest.raises(TimeoutError):
            await soon(anext(changes), 0.2)
    async with aclosing(registry.changes()) as changes:
        await soon(anext(changes))
        await registry.deregister(NEW.name, NEW.incarnation)
        await soon(anext(changes))


async def test_every_watcher_wakes(registry):
    async with aclosing(registry.changes()) as one, aclosing(registry.changes()) as two:
        await soon(asyncio.gather(anext(one), anext(two)))
        await registry.register(OLD, LONG_S)
        await soon(asyncio.gather(anext(one), anext(two)))


async def test_the_seed_is_made_once(registry):
    seeds = await asyncio.gather(*(registry.cluster_seed() for _ in range(8)))
    assert len(set(seeds)) == 1 and len(seeds[0]) == 32


async def test_closing_twice_is_fine(registry):
    await registry.list()
    await registry.close()
    await registry.close()


async def test_in_memory_leases_follow_the_clock_that_is_passed_in():
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    await registry.register(OLD, 10.0)
    clock.advance(9.9)
    assert await registry.list() == [OLD]
    clock.advance(0.1)
    assert await registry.list() == []


async def test_clusters_under_different_prefixes_do_not_see_each_other(valkey, prefix):
    one, two = RedisRegistry(valkey.url, prefix), RedisRegistry(valkey.url, prefix + "-2")
    await one.register(OLD, LONG_S)
    assert await two.list() == []
    assert await one.cluster_seed() != await two.cluster_seed()
    await asyncio.gather(one.close(), two.close())


async def test_two_processes_share_seed_and_rows(valkey, prefix):
    one, two = RedisRegistry(valkey.url, prefix), RedisRegistry(valkey.url, prefix)
    await one.register(OLD, LONG_S)
    assert await two.list() == [OLD]
    assert await one.cluster_seed() == await two.cluster_seed()
    await asyncio.gather(one.close(), two.close())


async def test_a_row_that_cannot_be_read_is_left_out_with_a_log_line(valkey, prefix, caplog):
    async with Redis.from_url(valkey.url) as client:
        await client.hset(f"{prefix}:nodes", mapping={"decode-9": b'{"name": 5}', OLD.name: b"\xff"})
    registry = RedisRegistry(valkey.url, prefix)
    await registry.register(OLD, LONG_S)
    assert await registry.list() == [OLD]
    assert "decode-9" in caplog.text
    await registry.close()


async def test_a_damaged_seed_is_an_error_that_does_not_show_it(valkey, prefix):
    async with Redis.from_url(valkey.url) as client:
        await client.set(f"{prefix}:seed", b"secret")
    registry = RedisRegistry(valkey.url, prefix)
    with pytest.raises(ConfigurationError, match=f"{prefix}:seed", check=lambda e: "secret" not in e.message):
        await registry.cluster_seed()
    await registry.close()


def test_a_url_that_cannot_be_read_is_a_configuration_error():
    with pytest.raises(ConfigurationError, check=lambda error: error.param == "redis_url"):
        RedisRegistry("nonsense", "p")


async def test_an_outage_is_unavailable_at_once_and_its_end_wakes_the_watcher():
    with running_server() as server:
        registry = RedisRegistry(server.url, "p")
        async with aclosing(registry.changes()) as changes:
            await soon(anext(changes))
            server.stop()
            started_s = time.monotonic()
            for call in (registry.list(), registry.register(OLD, LONG_S), registry.cluster_seed()):
                with pytest.raises(Unavailable, match="does not answer"):
                    await call
            assert time.monotonic() - started_s < 5.0
            server.start()
            await soon(anext(changes))
        await registry.register(OLD, LONG_S)
        assert await registry.list() == [OLD]
        await registry.close()


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_call_that_is_cancelled_while_it_connects_ends_cancelled(valkey, prefix, turns):
    """The client swallows a cancellation that arrives while it opens its first connection."""
    registry = RedisRegistry(valkey.url, prefix)
    call = asyncio.create_task(registry.list())
    for _ in range(turns):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(call)
    await registry.close()


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_watch_that_is_cancelled_while_it_connects_ends_cancelled(valkey, prefix, turns):
    registry = RedisRegistry(valkey.url, prefix)

    async def watch():
        async for _ in registry.changes():
            pass

    watching = asyncio.create_task(watch())
    for _ in range(turns):
        await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(watching)
    await registry.close()


async def test_a_seed_is_written_again_after_a_flush_and_never_over_another(valkey, prefix):
    knows = RedisRegistry(valkey.url, prefix)
    seed = await knows.cluster_seed()
    async with Redis.from_url(valkey.url) as redis:
        await redis.delete(f"{prefix}:seed")
    starting = RedisRegistry(valkey.url, prefix, seed_grace_s=5.0)
    asked = asyncio.ensure_future(starting.cluster_seed())
    await asyncio.sleep(0.05)
    await knows.keep_seed(seed)
    assert await asked == seed
    await starting.keep_seed(bytes(32))
    assert await knows.cluster_seed() == seed
    await knows.close()
    await starting.close()


async def test_a_configured_seed_that_is_not_the_clusters_is_refused_by_name(valkey, prefix):
    first, other = (RedisRegistry(valkey.url, prefix, seed=bytes([n]) * 32) for n in (1, 2))
    assert await first.cluster_seed() == bytes([1]) * 32
    with pytest.raises(ConfigurationError) as refused:
        await other.cluster_seed()
    assert refused.value.param == "kv_cache_hash_seed"
    await first.close()
    await other.close()


async def test_a_server_that_was_away_gives_everybody_the_time_that_it_missed(valkey, prefix):
    """Stopped, or down with its data on disk, for longer than any lease: nobody could refresh one."""
    registry = RedisRegistry(valkey.url, prefix)
    await registry.register(OLD, LONG_S)
    await registry.orchestrators.register(ORCHESTRATOR, LONG_S)
    away_ms = 10 * round(LONG_S * 1000)
    async with Redis.from_url(valkey.url) as redis:
        await redis.decrby(f"{prefix}:judged", away_ms)
        await redis.zincrby(f"{prefix}:leases", -away_ms, OLD.name)
        await redis.zincrby(f"{prefix}:orchestrator-leases", -away_ms, ORCHESTRATOR.name)
        assert await registry.orchestrators.list() == [ORCHESTRATOR]
        assert await registry.list() == [OLD]
        await redis.zincrby(f"{prefix}:leases", -away_ms, OLD.name)
        assert await registry.list() == [], "a lease that ran out while the server was there"
    await registry.close()


async def test_leases_end_though_nobody_looks_but_now_and_then(valkey, prefix):
    registry = RedisRegistry(valkey.url, prefix)
    await registry.register(OLD, 2.0)
    between_ms = 10_000
    async with Redis.from_url(valkey.url) as redis:
        for _ in range(5):
            await redis.decrby(f"{prefix}:judged", between_ms)
            await redis.zincrby(f"{prefix}:leases", -between_ms, OLD.name)
            left = await registry.list()
    assert left == []
    await registry.close()


async def test_a_server_that_is_full_is_read_and_drops_nobody():
    with running_server() as server:
        registry = RedisRegistry(server.url, "test")
        await registry.register(OLD, SHORT_S)
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("maxmemory", 1)
            assert await registry.list() == [OLD]
            with pytest.raises(Unavailable, match="OOM|maxmemory"):
                await registry.register(OTHER, LONG_S)
            await asyncio.sleep(2 * SHORT_S)
            assert await registry.list() == [OLD]
            await redis.config_set("maxmemory", 0)
            async with asyncio.timeout(60.0):
                while await registry.list():  # noqa: ASYNC110  # a server's answer
                    await asyncio.sleep(SHORT_S)
        await registry.close()


async def test_no_seed_is_made_while_anybody_is_registered_who_knows_it(valkey, prefix):
    registry = RedisRegistry(valkey.url, prefix, seed_grace_s=0.1)
    await registry.register(OLD, LONG_S)
    asked = asyncio.create_task(registry.cluster_seed())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asked), 0.5)
    await registry.keep_seed(b"s" * 32)
    assert await soon(asked, 60.0) == b"s" * 32
    async with Redis.from_url(valkey.url) as redis:
        await redis.delete(f"{prefix}:seed")
    asked = asyncio.create_task(registry.cluster_seed())
    await asyncio.sleep(0)
    await registry.register(OLD, SHORT_S)  # and is never refreshed: nobody is left who knows it
    assert len(await soon(asked, 60.0)) == 32
    await registry.close()
