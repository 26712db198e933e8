"""Redis fails in every way that it can while streams run and requests arrive: no request notices, and all of it heals.

Requests never touch Redis but for one look at the directory, in a bound of its own; here every answer is compared with
the one without a fault, and requests are seen to be answered while the fault lasts.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from kvcache.directory import KEY_BYTES
from kvcache.redis_registry import RedisRegistry
from tests.fakes.canary_engine import SEED
from tests.integration.nodes.rig import PATIENCE_S
from tests.integration.orchestrator.redis_site import CLIENTS, PREFIX, PREFIXES, RedisSite, redis_site

Fault = Callable[[RedisSite], Awaitable[None]]


@asynccontextmanager
async def commands(address: str) -> AsyncIterator[Redis]:
    """To the server itself, beside the proxy."""
    async with Redis.from_url(f"redis://{address}/0") as redis:
        yield redis


async def killed(site: RedisSite) -> None:
    """And started again, empty."""
    site.server.stop()
    await site.troubled()
    await site.more_answers()
    site.server.start()


async def stopped(site: RedisSite) -> None:
    """SIGSTOP: the connections stand, and nothing comes."""
    os.kill(site.server.pid, signal.SIGSTOP)
    try:
        await site.troubled()
        await site.more_answers()
    finally:
        os.kill(site.server.pid, signal.SIGCONT)


async def flushed(site: RedisSite) -> None:
    async with commands(site.server.address) as redis:
        assert await redis.exists(f"{PREFIX}:seed")
        await redis.flushall()
    await site.more_answers()


async def slow(site: RedisSite) -> None:
    """Half a second away, there and back, for long enough that leases have to be refreshed that way."""
    site.proxy.delay(0.25)
    await site.until(lambda: site.proxy.ways["up"].slowed_bytes > 8_000)
    await site.more_answers()
    site.proxy.heal()


async def full(site: RedisSite) -> None:
    """maxmemory with noeviction: reads are answered, writes are not."""
    async with commands(site.server.address) as redis:
        await redis.config_set("maxmemory", 1)
        await site.troubled()
        await site.more_answers()
        await redis.config_set("maxmemory", 0)


async def read_only(site: RedisSite) -> None:
    """A master that was made a replica of one that is not there."""
    async with commands(site.server.address) as redis:
        await redis.replicaof("127.0.0.1", "1")
        await site.troubled()
        await site.more_answers()
        await redis.replicaof("NO", "ONE")


async def another_password(site: RedisSite) -> None:
    async with commands(site.server.address) as redis:
        await redis.config_set("requirepass", "secret")
        site.proxy.reset()
        await site.troubled()
        await site.more_answers()
        await redis.config_set("requirepass", "")


async def loading(site: RedisSite) -> None:
    """A server that has been restarted and reads its data still."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    site.proxy.redirect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    site.proxy.reset()
    await site.troubled()
    await site.more_answers()
    site.proxy.redirect(site.server.address)
    site.proxy.reset()
    server.close()


FAULTS = [killed, stopped, flushed, slow, full, read_only, another_password, loading]


@pytest.mark.cells("F11 P1", "F11 P10")
@pytest.mark.field("dynamo#11068", "LMCache#2017")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_redis_is(fault: Fault) -> None:
    async with redis_site() as site:
        await fault(site)
        await site.heals()


@pytest.mark.field("dynamo#11068")
@pytest.mark.cells("F11 P1", "F11 P10")
@pytest.mark.parametrize("connections", ["reset", "stay"])
async def test_a_replica_takes_over_from_a_master_that_lives_on(connections: str) -> None:
    """What the master took last never came to the replica. Its old connections stand where `stay`: it says READONLY."""
    async with redis_site() as site:
        replica = site.another_server()
        replica.start()
        async with commands(site.server.address) as old, commands(replica.address) as new:
            await old.config_set("repl-diskless-sync-delay", 0)
            await new.replicaof("127.0.0.1", str(site.server.port))
            async with asyncio.timeout(PATIENCE_S):
                while (await new.info("replication")).get("master_link_status") != "up":  # noqa: ASYNC110  (a server's answer)
                    await asyncio.sleep(0.01)
                assert await new.exists(f"{PREFIX}:dir:entries")
                await new.replicaof("NO", "ONE")
            await site.more_answers()  # which only the old one is told of
            await old.replicaof("127.0.0.1", str(replica.port))
        site.proxy.redirect(replica.address)
        if connections == "reset":
            site.proxy.reset()
        await site.heals(replica)


@pytest.mark.field("LMCache#2017")
async def test_redis_holds_locations_and_nothing_of_any_size() -> None:
    """Blocks themselves are thousands of bytes, even a canary's are dozens; what stands for one here is not."""
    async with redis_site() as site, commands(site.server.address) as redis:
        await site.more_answers(CLIENTS * PREFIXES)
        sizes: dict[str, int] = {}
        async for key in redis.scan_iter(count=1000):
            name = key.split(b":")[-1] if not key.startswith(f"{PREFIX}:dir:".encode()) else key.split(b":")[2]
            values = await values_of(redis, key)
            sizes[name.decode()] = max([sizes.get(name.decode(), 0), *map(len, values)])
        assert sizes.pop("nodes") < 2048, "a node's record"
        assert sizes.pop("seed") == 32
        assert sizes["row"] <= 4 * len(site.nodes), "four bytes for each life that has the block"
        assert sizes["of"] == KEY_BYTES
        assert max(sizes.values()) < 128, sizes
        await site.heals()


async def values_of(redis: Redis, key: bytes) -> list[bytes]:
    """No value where it has gone meanwhile."""
    match await redis.type(key):
        case b"string":
            return [value for value in [await redis.get(key)] if value is not None]
        case b"set":
            return list(await redis.smembers(key))
        case b"hash":
            return list((await redis.hgetall(key)).values())
        case b"zset":
            return list(await redis.zrange(key, 0, -1))
        case b"none":
            return []
        case other:
            raise AssertionError(f"{key!r} is a {other!r}")


async def test_who_starts_while_the_seed_is_lost_gets_the_clusters() -> None:
    """Whether or not anybody has said it again in the time that is waited for."""
    async with redis_site() as site:
        async with commands(site.server.address) as redis:
            await redis.delete(f"{PREFIX}:seed")
        newcomer = RedisRegistry(site.url, PREFIX, seed_grace_s=0.1)
        try:
            assert await newcomer.cluster_seed() == SEED
        finally:
            await newcomer.close()
        await site.heals()
