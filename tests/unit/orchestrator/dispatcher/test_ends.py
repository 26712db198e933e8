import asyncio

import pytest

from pipelines.types.frames import Abort
from pipelines.types.status import GenerationStatus
from pronghorn.errors import (
    DeadlineExceeded,
)
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


# --- deadlines ---


async def test_a_deadline_that_has_passed_is_refused_at_the_door(cluster: Cluster) -> None:
    await cluster.join("decode-1")
    with pytest.raises(DeadlineExceeded):
        await cluster.tokens_of(cluster.job(budget_s=0.0))
    cluster.assert_at_rest()


async def test_a_deadline_passes_in_the_queue(client: Owner) -> None:
    async with running(max_in_flight=1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await cluster.first_token(node, cluster.job(), client)
        with pytest.raises(DeadlineExceeded, match="queued"):
            await cluster.tokens_of(cluster.job(budget_s=0.03))
        assert len(node.submits) == 1
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        cluster.assert_at_rest()


async def test_a_deadline_passes_before_the_first_token(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    with pytest.raises(DeadlineExceeded, match="dispatched"):
        await cluster.tokens_of(cluster.job(budget_s=0.03))
    assert node.aborts == [node.submits[0].fence]
    cluster.assert_at_rest()


async def test_a_deadline_passes_between_tokens(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(budget_s=0.2), client)
    with pytest.raises(DeadlineExceeded, match="streaming"):
        await request
    assert node.aborts == [submit.fence]
    cluster.assert_at_rest()


async def test_a_deadline_frees_the_node_of_a_consumer_that_stands_still(cluster: Cluster) -> None:
    node = await cluster.join("decode-1", answer=lambda submit: [[5], [6]])
    node.answer = None
    released = asyncio.Event()

    async def stand_still() -> None:
        async with cluster.replica.generate(cluster.job(budget_s=0.2)) as outputs:
            await anext(outputs)
            await released.wait()
            async for _ in outputs:
                pass

    owner = Owner("still")
    task = owner.start(stand_still(), "consumer")
    submit = await node.submitted()
    node.produce(submit.fence, 7)
    await cluster.until(lambda: node.aborts == [submit.fence])
    cluster.assert_at_rest()
    released.set()
    with pytest.raises(DeadlineExceeded):
        await task


# --- the client leaves ---


async def test_a_client_that_leaves_the_queue_takes_no_slot(client: Owner) -> None:
    async with running(max_in_flight=1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await cluster.first_token(node, cluster.job(), client)
        waiting = client.start(cluster.tokens_of(cluster.job()), "waiting")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        waiting.cancel()
        await cluster.until(lambda: cluster.replica.in_flight() == 1)
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        assert len(node.submits) == 1
        cluster.assert_at_rest()


async def test_a_client_that_leaves_before_the_first_token_frees_the_node_at_once(
    cluster: Cluster, client: Owner
) -> None:
    node = await cluster.join("decode-1")
    request = client.start(cluster.tokens_of(cluster.job()), "request")
    submit = await node.submitted()
    request.cancel()
    await cluster.until(request.done)
    assert node.received == [submit, Abort(submit.fence)]
    assert cluster.replica.counters()["request_ended.cancelled"] == 1
    cluster.assert_at_rest()


async def test_a_client_that_leaves_between_tokens_frees_the_node_at_once(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
    request.cancel()
    await cluster.until(request.done)
    assert node.aborts == [submit.fence]
    cluster.assert_at_rest()


@pytest.mark.conformance(70)
async def test_the_api_that_stops_early_aborts_the_node_and_finishes(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    node.answer = None
    owner = Owner("api")
    seen: list[int] = []

    async def stop_at_first() -> None:
        async with cluster.replica.generate(cluster.job()) as outputs:
            async for output in outputs:
                seen.extend(output.tokens)
                break

    task = owner.start(stop_at_first(), "request")
    submit = await node.submitted()
    node.produce(submit.fence, 7)
    await task
    assert seen == [7]
    assert node.aborts == [submit.fence]
    assert cluster.replica.counters()["request_ended.finished"] == 1
    cluster.assert_at_rest()
