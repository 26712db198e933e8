"""Two tenants with one prompt and different salts share no block, wherever blocks lie."""

import asyncio
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.redis_directory import RedisDirectory
from tests.fakes.cache_hints import chain, hint
from tests.fakes.canary_pipeline import continuation
from tests.fakes.valkey_server import ValkeyServer
from tests.integration.nodes.rig import Node, Orchestrator, Rig, prompt
from tests.integration.nodes.test_tiers import copied, kept, tiers_of

SHARED = prompt(10, 0)
A, B = "tenant-a", "tenant-b"


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="vk") as folder:
        running = ValkeyServer(Path(folder))
        running.start()
        yield running
        running.stop()


async def cached_of(orchestrator: Orchestrator, salt: str, **more: object) -> int | None:
    fence = await orchestrator.submit([*SHARED, 1], 2, salt=salt, **more)  # type: ignore[arg-type]  # a hint or nothing
    assert await orchestrator.result(fence) == continuation([*SHARED, 1], 2)
    return orchestrator.deltas[fence][0].num_cached_tokens


@pytest.mark.conformance(33)
@pytest.mark.field("sglang#37160")
@pytest.mark.field("LMCache#4825")
@pytest.mark.usefixtures("patient")
async def test_pool_events_rows_and_peers_give_a_tenant_nothing_of_anothers(rig: Rig, server: ValkeyServer) -> None:
    rig.directory = directory = RedisDirectory(server.url, uuid.uuid4().hex, 1 << 20)
    holder, _ = await rig.decode("decode-1")
    other, _ = await rig.decode("decode-2")
    await rig.registered(holder, other)
    one, two = await rig.orchestrator(holder), await rig.orchestrator(other)
    assert await cached_of(one, A) == 0

    # the pool: the same tenant hits, another does not
    assert await cached_of(one, A) == len(SHARED)
    assert await cached_of(one, B) == 0

    # events and rows: no key of one is a key of the other
    keys_a, keys_b = ({h[:8] for h in chain(SHARED, salt)} for salt in (A, B))
    await one.until(lambda: one.cached_keys() >= keys_a | keys_b)
    assert not keys_a & keys_b and not keys_a & {h[:8] for h in chain(SHARED)}
    async with asyncio.timeout(60.0):
        while not await directory.depths(chain(SHARED, B)):  # noqa: ASYNC110  # a server's answer, told by no event
            await asyncio.sleep(0.02)
    assert await directory.depths(chain(SHARED, "tenant-c")) == {} == await directory.depths(chain(SHARED))

    # peers: what a tenant's own salt names comes over, by the directory alone; a replayed hint asks nobody
    served = holder.counters.value("fetch_served")
    assert await cached_of(two, "tenant-c", hint=hint(SHARED, A, decode_1=10)) == 0
    assert holder.counters.value("fetch_served") == served
    assert other.counters.value("cache_hint_miss", "wrong_hash") == 1
    assert await cached_of(two, A) == len(SHARED)
    assert other.counters.value("blocks_fetched") == 10


@pytest.mark.conformance(33)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["local", "tiered", "dkv over local"])
async def test_host_and_disk_tiers_give_a_tenant_nothing_of_anothers(rig: Rig, tmp_path: Path, kind: str) -> None:
    node, _ = await rig.decode(num_blocks=16, tiers=tiers_of(kind, tmp_path))
    orchestrator = await rig.orchestrator(node)
    assert await cached_of(orchestrator, A) == 0
    await kept(node, 10)
    await evict(orchestrator, node)
    assert await cached_of(orchestrator, B) == 0
    assert node.counters.value("blocks_restored") == 0
    await evict(orchestrator, node)
    assert (await cached_of(orchestrator, A) or 0) > 0


async def evict(orchestrator: Orchestrator, node: Node) -> None:
    await copied(node)
    await orchestrator.result(await orchestrator.submit(prompt(12, start=500), 2))
    await copied(node)
