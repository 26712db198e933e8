"""An orchestrator as its operators see it: found in the registry, apart from the nodes, and telling the truth."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from kvcache.handshake import Identity
from operations.port import ROUTES
from orchestrator.presence import Presence
from orchestrator.replicas import Replicas
from pipelines.types.frames import BlockEvents, BlocksStored, Heartbeat
from pronghorn.ids import new_incarnation
from pronghorn.ledger import Kind, Ledger
from tests.fakes.memory_node import MODEL, report
from tests.fakes.metric_samples import samples
from tests.fakes.orchestrator_cluster import Cluster, running

LEASE_S = 60.0


@asynccontextmanager
async def present(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """The replica's operations port, found in the registry."""
    identity = Identity(role="orchestrator", name="orchestrator-1", incarnation=new_incarnation(), model=MODEL)
    presence = Presence(Replicas([cluster.replica]), identity, cluster.registry, LEASE_S)
    await presence.start("127.0.0.1")
    try:
        async with asyncio.timeout(60.0):
            while not (rows := await cluster.registry.orchestrators.list()):  # noqa: ASYNC110  # told by no event
                await asyncio.sleep(0.001)
        [row] = rows
        assert row.incarnation == identity.incarnation
        async with httpx.AsyncClient(base_url=f"http://{row.operations_address}", trust_env=False) as client:
            yield client
    finally:
        await presence.stop()
    assert await cluster.registry.orchestrators.list() == []


async def ledger(client: httpx.AsyncClient) -> Ledger:
    return msgspec.json.decode((await client.get("/internal/ledger")).content, type=Ledger)


async def test_it_is_found_in_the_registry_and_is_no_node() -> None:
    async with running() as cluster, present(cluster) as client:
        assert await cluster.registry.list() == []
        assert cluster.views() == []
        assert [(await client.get(path)).status_code for path in ROUTES] == [200, 503, 200, 200]


async def test_it_is_ready_with_a_usable_decode_node_only() -> None:
    async with running() as cluster, present(cluster) as client:
        await cluster.join("prefill-1")
        answer = await client.get("/ready")
        assert answer.status_code == 503 and "no decode node is usable" in answer.json()["reason"]
        await cluster.join("decode-1")
        assert (await client.get("/ready")).status_code == 200
        assert samples((await client.get("/metrics")).content)["pronghorn:num_nodes_usable", ""] == 2
        await cluster.replica.dispatcher.drain(0.0)
        assert "shutting down" in (await client.get("/ready")).json()["reason"]


async def test_a_new_one_is_ready_when_it_knows_what_its_nodes_hold() -> None:
    async with running() as cluster, present(cluster) as client:
        node = await cluster.join("decode-1")
        node.say(Heartbeat(msgspec.structs.replace(report(node.record), findable_blocks=3)))
        await cluster.until(lambda: cluster.replica.nodes()[0].findable_blocks == 3)
        answer = await client.get("/ready")
        assert (answer.status_code, "decode-1 are not known yet" in answer.json()["reason"]) == (503, True)
        node.say(BlockEvents(1, [BlocksStored(None, bytes(range(24)))], snapshot=True))
        await cluster.until(lambda: cluster.replica.holdings.synced(node.record.incarnation))
        assert (await client.get("/ready")).status_code == 200
        told = samples((await client.get("/metrics")).content)
        index = {name: told[f"pronghorn:block_index_{name}", ""] for name in ("blocks", "entries", "nodes_synced")}
        assert index == {"blocks": 3, "entries": 3, "nodes_synced": 1}
        assert told["pronghorn:block_index_bytes", ""] > 0
        node.lose()  # one node's blocks are no reason to turn requests away, once
        await cluster.until(lambda: not cluster.replica.holdings.synced(node.record.incarnation))
        await cluster.until(lambda: cluster.replica.ready()[0])


async def test_a_request_is_in_the_ledger_until_it_has_ended() -> None:
    async with running(max_in_flight=1) as cluster, present(cluster) as client:
        node = await cluster.join("decode-1")
        assert (await ledger(client)).at_rest
        jobs = [cluster.job(), cluster.job()]
        waiting = [asyncio.ensure_future(cluster.replica.generate(job).__aenter__()) for job in jobs]
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        held = await ledger(client)
        first, second = (str(job.context.request_id) for job in jobs)
        assert [row.owner for row in held.of(Kind.FLIGHT)] == [first, second]
        assert [row.owner for row in held.of(Kind.TIMER)] == [first, second]
        assert [row.owner for row in held.of(Kind.SLOT)] == [first]
        assert [row.owner for row in held.of(Kind.QUEUE_PLACE)] == [second]
        [dispatched], [session] = held.of(Kind.DISPATCHED), held.of(Kind.SESSION)
        assert dispatched.peer == session.peer == node.record.incarnation
        found = samples((await client.get("/metrics")).content)
        assert (found["pronghorn:num_requests_running", ""], found["pronghorn:num_requests_waiting", ""]) == (1, 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await ledger(client)).at_rest
