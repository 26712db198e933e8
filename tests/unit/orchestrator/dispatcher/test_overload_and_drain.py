import asyncio
from dataclasses import replace

import pytest

from pipelines.types.status import GenerationStatus
from pronghorn.errors import (
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from pronghorn.ids import RequestID
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


@pytest.mark.conformance(61)
async def test_a_full_queue_is_overloaded_and_the_first_in_is_the_first_out(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue=1) as cluster:
        node = await cluster.join("decode-1")
        first = client.start(cluster.tokens_of(cluster.job()), "first")
        await node.submitted(1)
        second = client.start(cluster.tokens_of(cluster.job()), "second")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        with pytest.raises(Overloaded) as refused:
            await cluster.tokens_of(cluster.job())
        assert refused.value.retry_after_s == 1.0
        node.produce(node.submits[0].fence, 1, status=DONE)
        assert await first == [1]
        submit = await node.submitted(2)
        node.produce(submit.fence, 2, status=DONE)
        assert await second == [2]
        cluster.assert_at_rest()


async def test_an_urgent_request_takes_a_place_in_the_full_queue_and_comes_first(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue=2) as cluster:
        node = await cluster.join("decode-1")
        running_now = client.start(cluster.tokens_of(cluster.job()), "running")
        await node.submitted(1)
        waiting = client.start(cluster.tokens_of(cluster.job()), "waiting")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        displaced = asyncio.ensure_future(cluster.tokens_of(cluster.job()))
        await cluster.until(lambda: cluster.replica.in_flight() == 3)
        urgent = client.start(cluster.tokens_of(replace(cluster.job(), priority=-1)), "urgent")
        with pytest.raises(Overloaded, match="more right"):
            await displaced
        for number, request in enumerate((running_now, urgent, waiting), start=1):
            submit = await node.submitted(number)
            node.produce(submit.fence, number, status=DONE)
            assert await request == [number]
        assert cluster.replica.counters()["request_shed.displaced"] == 1
        cluster.assert_at_rest()


async def test_who_has_waited_as_long_as_one_may_is_told_so(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue_wait_s=0.05) as cluster:
        node = await cluster.join("decode-1")
        first = client.start(cluster.tokens_of(cluster.job()), "first")
        submit = await node.submitted(1)
        with pytest.raises(Overloaded, match="did not come within 0.05 s"):
            await cluster.tokens_of(cluster.job())
        node.produce(submit.fence, 1, status=DONE)
        assert await first == [1]
        cluster.assert_at_rest()


async def test_many_queued_requests_that_all_fail_at_once_end_one_by_one(client: Owner) -> None:
    patience_s = 1e6  # a queue that stands still for a second lets in no more than one a second: 1,500 s, and more
    bounds = {"heartbeat_timeout_s": patience_s, "silence_timeout_s": patience_s, "max_queue_wait_s": patience_s}
    async with running(max_in_flight=1, max_queue=2000, **bounds) as cluster:
        node = await cluster.join("decode-1")
        held = client.start(cluster.tokens_of(cluster.job(budget_s=patience_s)), "held")
        submit = await node.submitted()
        jobs = [cluster.job(budget_s=patience_s) for _ in range(1500)]
        waiting = [client.start(cluster.tokens_of(job), "waiting") for job in jobs]
        await cluster.until(lambda: cluster.replica.in_flight() == 1501)
        node.beat(draining=True)
        await cluster.until(lambda: not cluster.replica.ready()[0])
        node.produce(submit.fence, 1, status=DONE)
        assert await held == [1]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results)
        cluster.assert_at_rest()


async def test_one_request_id_is_in_flight_once(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    name = RequestID("mine")
    request, submit = await cluster.first_token(node, cluster.job(request_id=name), client)
    with pytest.raises(InvalidRequest, match="mine"):
        await cluster.tokens_of(cluster.job(request_id=name))
    node.produce(submit.fence, 8, status=DONE)
    assert await request == [7, 8]
    cluster.assert_at_rest()


async def test_a_drain_lets_requests_end_and_takes_no_new_ones(client: Owner) -> None:
    async with running(drain_s=30.0) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await cluster.first_token(node, cluster.job(), client)
        drain = client.start(cluster.replica.drain(), "drain")
        await cluster.until(lambda: cluster.replica.dispatcher.draining)
        with pytest.raises(Unavailable, match="shutting down"):
            await cluster.tokens_of(cluster.job())
        assert cluster.replica.ready() == (
            False,
            "1 decode and 0 prefill nodes are usable; decode nodes compute the prompts; shutting down",
        )
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        await drain
        cluster.assert_at_rest()


async def test_a_drain_whose_grace_is_over_fails_what_is_left(client: Owner) -> None:
    async with running(drain_s=0.03) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await cluster.first_token(node, cluster.job(), client)
        await cluster.replica.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            await request
        assert node.aborts == [submit.fence]
        cluster.assert_at_rest()


@pytest.mark.conformance(68)
async def test_resetting_the_prefix_cache_reaches_every_node(cluster: Cluster) -> None:
    nodes = [await cluster.join("decode-1"), await cluster.join("prefill-1")]
    await cluster.replica.reset_prefix_cache()
    assert [node.dropped_caches for node in nodes] == [1, 1]
