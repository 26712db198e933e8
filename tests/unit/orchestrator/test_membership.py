import asyncio
from collections.abc import AsyncIterator

import pytest

from kvcache.registry import NodeRecord
from pronghorn.clock import ManualClock
from pronghorn.errors import HandshakeRefused, Unavailable
from tests.fakes.memory_node import MemoryNodeClient
from tests.fakes.orchestrator_cluster import Cluster, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as cluster:
        yield cluster


async def test_a_registered_node_gets_a_session_and_one_that_leaves_loses_its_place(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    assert cluster.replica.ready()[0]
    await cluster.leave("decode-1")
    node.lose("it stopped")
    await cluster.until(lambda: cluster.replica.nodes() == [])
    assert node.sessions == 1
    assert not cluster.replica.ready()[0]


async def test_a_broken_session_is_opened_again_while_the_node_is_registered(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    node.lose()
    await cluster.until(lambda: node.sessions == 2 and cluster.usable("decode-1"))
    assert cluster.replica.counters()["session_lost.decode"] == 1


async def test_a_node_that_refuses_the_handshake_is_tried_again_and_said_to_be_unusable(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    node.refuses = HandshakeRefused("seed_digest differs", param="seed_digest")
    node.lose()
    await cluster.until(lambda: cluster.why_not("decode-1") == "seed_digest differs")
    with pytest.raises(Unavailable, match="decode-1: seed_digest differs"):
        async with cluster.replica.generate(cluster.job()):
            pass
    node.refuses = None
    await cluster.until(lambda: cluster.usable("decode-1"))


async def test_why_a_session_cannot_be_opened_is_logged_once_until_it_changes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    node = await cluster.join("prefill-1")
    node.refuses = HandshakeRefused("layout.dtype differs")
    node.lose()
    await cluster.until(lambda: node.tries > 3)
    node.refuses = HandshakeRefused("model differs")
    await cluster.until(lambda: node.tries > 6)
    said = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert ["layout" in said[0], "model" in said[1], len(said)] == [True, True, 2]
    assert "prefill-1" in said[0]


async def test_a_new_incarnation_ends_the_session_with_the_old(cluster: Cluster) -> None:
    old = await cluster.join("decode-1")
    new = await cluster.join("decode-1", incarnation="life-2", registered_at_unix_s=2.0)
    await cluster.until(lambda: cluster.usable("decode-1"))
    (report,) = cluster.replica.nodes()
    assert report.incarnation == "life-2"
    assert (old.sessions, new.sessions) == (1, 1)


async def test_a_silent_node_loses_its_session() -> None:
    async with running(silence_timeout_s=0.3) as cluster:
        node = await cluster.join("decode-1")
        await cluster.until(lambda: node.sessions >= 2)
        assert cluster.replica.counters()["session_lost.decode"] >= 1


async def test_a_process_that_was_held_up_takes_none_of_its_nodes_for_dead() -> None:
    clock = ManualClock()
    async with running(clock) as cluster:
        node = await cluster.join("decode-1")
        clock.advance(3600.0)  # not one turn of the loop meanwhile
        assert cluster.usable("decode-1") and node.sessions == 1


async def test_a_registry_that_does_not_answer_changes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.join("decode-1", answer=lambda submit: [[5]])

    async def away() -> list[NodeRecord]:
        raise Unavailable("no answer within 1 s")

    monkeypatch.setattr(cluster.registry, "list", away)
    await cluster.until(lambda: cluster.replica.counters().get("registry_unavailable", 0) >= 2)
    ready, said = cluster.replica.ready()
    assert ready
    assert "the node registry does not answer" in said
    async with cluster.replica.generate(cluster.job()) as outputs:
        assert [output.tokens async for output in outputs] == [[5]]


async def test_a_registry_that_came_back_empty_does_not_end_live_sessions(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    await cluster.leave("decode-1")
    await cluster.until(lambda: not cluster.replica._nodes.registered(node.record.incarnation))
    assert cluster.usable("decode-1")
    await cluster.registry.register(node.record, 60.0)
    await cluster.until(lambda: cluster.replica._nodes.registered(node.record.incarnation))
    assert node.sessions == 1


async def test_a_session_opened_while_its_node_was_off_the_list_counts_when_the_node_is_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await cluster.join("decode-1")
    connecting, go_on, connect = asyncio.Event(), asyncio.Event(), MemoryNodeClient.connect

    async def held(client: MemoryNodeClient) -> None:
        connecting.set()
        await go_on.wait()
        await connect(client)

    monkeypatch.setattr(MemoryNodeClient, "connect", held)
    node.lose()
    await connecting.wait()
    await cluster.leave("decode-1")
    await cluster.until(lambda: cluster.replica.nodes() == [])
    go_on.set()
    await cluster.until(lambda: node.sessions == 2)
    await cluster.registry.register(node.record, 60.0)
    await cluster.until(lambda: cluster.replica.nodes() != [])
    node.beat()
    await cluster.until(lambda: cluster.usable("decode-1"))
    assert node.sessions == 2
