import asyncio
from collections.abc import AsyncIterator

import pytest

from orchestrator.ports import GenerationJob
from pipelines.types.frames import Abort, Submit
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import (
    DeadlineExceeded,
    EndpointNotFound,
    InsufficientBlocks,
    InvalidRequest,
    NodeLost,
    NodeRefused,
    Overloaded,
    PronghornError,
    Unavailable,
)
from pronghorn.ids import RequestID
from pronghorn.tasks import Owner
from tests.fakes.memory_node import MemoryNode
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as cluster:
        yield cluster


@pytest.fixture
async def client() -> AsyncIterator[Owner]:
    """Who runs the requests of a test."""
    owner = Owner("client")
    yield owner
    await owner.stop(1.0)


async def tokens_of(cluster: Cluster, job: GenerationJob) -> list[int]:
    async with cluster.replica.generate(job) as outputs:
        return [token async for output in outputs for token in output.tokens]


def at_rest(cluster: Cluster) -> None:
    cluster.replica.dispatcher.check()
    assert cluster.replica.in_flight() == 0
    assert all(node.in_flight == 0 for node in cluster.views())


# --- it answers ---


async def test_a_request_is_sent_to_a_decode_node_and_its_tokens_come_back(cluster: Cluster) -> None:
    await cluster.join("prefill-1")
    await cluster.join("decode-1", answer=lambda submit: [[5], [6, 7], [2]])
    job = cluster.job()
    outputs: list[TextGenerationOutput] = []
    async with cluster.replica.generate(job) as stream:
        outputs = [output async for output in stream]
    assert [output.tokens for output in outputs] == [[5], [6, 7], [2]]
    assert [output.is_done for output in outputs] == [False, False, True]
    assert outputs[0].request_id == job.context.request_id
    (submit,) = cluster["decode-1"].submits
    assert submit.context is job.context
    assert [target.name for target in submit.prefill] == ["prefill-1"]
    assert 0 < submit.budget_s <= 30
    assert submit.fence.incarnation == "decode-1-1"
    at_rest(cluster)


async def test_nothing_is_aborted_after_the_end(cluster: Cluster) -> None:
    node = await cluster.join("decode-1", answer=lambda submit: [[5]])
    assert await tokens_of(cluster, cluster.job()) == [5]
    assert node.aborts == []


async def test_requests_spread_over_the_decode_nodes(cluster: Cluster, client: Owner) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    for _ in range(4):
        client.start(tokens_of(cluster, cluster.job()), "request")
    await first.submitted(2)
    await second.submitted(2)
    for node in (first, second):
        for submit in node.submits:
            node.produce(submit.fence, 1, status=DONE)
    await cluster.until(lambda: client.running == [])
    at_rest(cluster)


async def test_a_named_endpoint_is_carried_to_the_node_as_the_only_one(cluster: Cluster) -> None:
    await cluster.join("prefill-1")
    await cluster.join("prefill-2")
    node = await cluster.join("decode-1", answer=lambda submit: [[5]])
    await tokens_of(cluster, cluster.job(target_endpoint="prefill-2"))
    (submit,) = node.submits
    assert [target.name for target in submit.prefill] == ["prefill-2"]
    assert submit.only_these


@pytest.mark.conformance(44)
async def test_an_endpoint_that_does_not_exist_is_decided_before_anything_is_sent(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    with pytest.raises(EndpointNotFound):
        await tokens_of(cluster, cluster.job(target_endpoint="tcp://10.0.0.1:80"))
    assert node.submits == []
    at_rest(cluster)


@pytest.mark.conformance(38)
@pytest.mark.parametrize(
    ("hint", "reason"),
    [
        ({"version": 1, "instances": "all"}, "malformed"),
        ({}, "malformed"),
        ({"version": 9, "instances": []}, "wrong_version"),
        ({"version": 1, "instances": [{"name": "x", "blocks": 1, "last_hash": "0" * 16}]}, "unknown_instance"),
    ],
)
async def test_an_unusable_hint_is_counted_and_carried(cluster: Cluster, hint: dict[str, object], reason: str) -> None:
    node = await cluster.join("decode-1", answer=lambda submit: [[5]])
    assert await tokens_of(cluster, cluster.job(hint=hint)) == [5]
    assert cluster.replica.counters()[f"cache_hint_miss.{reason}"] == 1
    assert node.submits[0].context.external_block_metadata == hint


async def test_a_usable_hint_is_no_miss(cluster: Cluster) -> None:
    await cluster.join("decode-1", answer=lambda submit: [[5]])
    hint: dict[str, object] = {
        "version": 1,
        "instances": [{"name": "decode-1", "blocks": 1, "last_hash": "0" * 16}],
    }
    await tokens_of(cluster, cluster.job(hint=hint))
    assert not any(name.startswith("cache_hint_miss") for name in cluster.replica.counters())


# --- before the first token ---


async def test_without_a_decode_node_it_is_unavailable(cluster: Cluster) -> None:
    with pytest.raises(Unavailable) as refused:
        await tokens_of(cluster, cluster.job())
    assert refused.value.retry_after_s == 1.0
    at_rest(cluster)


@pytest.mark.parametrize("error", [NodeRefused("draining"), InsufficientBlocks("full"), Overloaded("queue full")])
async def test_a_node_that_refuses_is_followed_by_another(
    cluster: Cluster, client: Owner, error: PronghornError
) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    await cluster.until(lambda: bool(first.submits or second.submits))
    refuser, other = (first, second) if first.submits else (second, first)
    refuser.fail(refuser.submits[0].fence, error)
    submit = await other.submitted()
    assert submit.fence.attempt == 2
    assert submit.fence.incarnation == other.record.incarnation
    other.produce(submit.fence, 8, status=DONE)
    assert await request == [8]
    assert refuser.aborts == []
    assert cluster.replica.counters()["request_retried"] == 1
    at_rest(cluster)


async def test_a_node_that_is_lost_before_the_first_token_is_followed_by_another(
    cluster: Cluster, client: Owner
) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    await cluster.until(lambda: bool(first.submits or second.submits))
    lost, other = (first, second) if first.submits else (second, first)
    lost.lose()
    submit = await other.submitted()
    other.produce(submit.fence, 8, status=DONE)
    assert await request == [8]
    at_rest(cluster)


async def test_the_only_node_lost_before_the_first_token_is_one_typed_error(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    await node.submitted()
    node.lose("killed")
    with pytest.raises(NodeLost, match="killed") as lost:
        await asyncio.wait_for(asyncio.shield(request), 5.0)
    assert lost.value.retry_after_s == 1.0
    at_rest(cluster)


async def test_a_node_that_does_not_read_is_passed_over(client: Owner) -> None:
    async with running() as cluster:
        stuck = await cluster.join("decode-1")
        stuck.reading, stuck.send_queue_frames = False, 0
        await cluster.join("decode-2", answer=lambda submit: [[5]])
        assert await tokens_of(cluster, cluster.job()) == [5]
        assert await tokens_of(cluster, cluster.job()) == [5]
        at_rest(cluster)


async def test_attempts_are_bounded(cluster: Cluster) -> None:
    nodes = [await cluster.join(f"decode-{i}") for i in range(5)]
    for node in nodes:
        node.reading, node.send_queue_frames = False, 0
    with pytest.raises(Overloaded) as refused:
        await tokens_of(cluster, cluster.job())
    assert refused.value.retry_after_s == 1.0
    assert cluster.replica.counters()["request_retried"] == 2
    at_rest(cluster)


# --- after the first token ---


async def first_token(
    cluster: Cluster, node: MemoryNode, job: GenerationJob, client: Owner
) -> tuple[asyncio.Task[list[int]], Submit]:
    """A request whose first token has been delivered."""
    arrived = asyncio.Event()

    async def request() -> list[int]:
        tokens: list[int] = []
        async with cluster.replica.generate(job) as outputs:
            async for output in outputs:
                tokens += output.tokens
                arrived.set()
        return tokens

    task = client.start(request(), "request")
    submit = await node.submitted(len(node.submits) + 1)
    node.produce(submit.fence, 7)
    await arrived.wait()
    return task, submit


async def test_a_node_lost_after_the_first_token_is_one_typed_error_and_no_retry(
    cluster: Cluster, client: Owner
) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    other = await cluster.join("decode-2")
    node.lose("killed")
    with pytest.raises(NodeLost, match="killed"):
        await request
    assert other.submits == []
    at_rest(cluster)


async def test_a_failure_after_the_first_token_is_the_end_of_the_stream(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    node.produce(submit.fence, 8)
    node.fail(submit.fence, InsufficientBlocks("the pool is spent"))
    with pytest.raises(InsufficientBlocks, match="spent"):
        await request
    at_rest(cluster)


async def test_late_messages_are_counted_and_change_nothing(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    node.produce(submit.fence.__class__(submit.fence.request_id, 9, submit.fence.incarnation), 99)
    node.produce(submit.fence, 8, status=DONE)
    node.produce(submit.fence, 99)
    node.fail(submit.fence, NodeRefused("late"))
    assert await request == [7, 8]
    await cluster.until(lambda: cluster.replica.counters().get("message_refused.ended") == 2)
    assert cluster.replica.counters()["message_refused.late"] == 1
    at_rest(cluster)


# --- deadlines ---


async def test_a_deadline_that_has_passed_is_refused_at_the_door(cluster: Cluster) -> None:
    await cluster.join("decode-1")
    with pytest.raises(DeadlineExceeded):
        await tokens_of(cluster, cluster.job(budget_s=0.0))
    at_rest(cluster)


async def test_a_deadline_passes_in_the_queue(client: Owner) -> None:
    async with running(max_in_flight=1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await first_token(cluster, node, cluster.job(), client)
        with pytest.raises(DeadlineExceeded, match="queued"):
            await tokens_of(cluster, cluster.job(budget_s=0.03))
        assert len(node.submits) == 1
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        at_rest(cluster)


async def test_a_deadline_passes_before_the_first_token(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    with pytest.raises(DeadlineExceeded, match="dispatched"):
        await tokens_of(cluster, cluster.job(budget_s=0.03))
    assert node.aborts == [node.submits[0].fence]
    at_rest(cluster)


async def test_a_deadline_passes_between_tokens(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(budget_s=0.2), client)
    with pytest.raises(DeadlineExceeded, match="streaming"):
        await request
    assert node.aborts == [submit.fence]
    at_rest(cluster)


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
    at_rest(cluster)
    released.set()
    with pytest.raises(DeadlineExceeded):
        await task


# --- the client leaves ---


async def test_a_client_that_leaves_the_queue_takes_no_slot(client: Owner) -> None:
    async with running(max_in_flight=1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await first_token(cluster, node, cluster.job(), client)
        waiting = client.start(tokens_of(cluster, cluster.job()), "waiting")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        waiting.cancel()
        await cluster.until(lambda: cluster.replica.in_flight() == 1)
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        assert len(node.submits) == 1
        at_rest(cluster)


async def test_a_client_that_leaves_before_the_first_token_frees_the_node_at_once(
    cluster: Cluster, client: Owner
) -> None:
    node = await cluster.join("decode-1")
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    submit = await node.submitted()
    request.cancel()
    await cluster.until(request.done)
    assert node.received == [submit, Abort(submit.fence)]
    assert cluster.replica.counters()["request_ended.cancelled"] == 1
    at_rest(cluster)


async def test_a_client_that_leaves_between_tokens_frees_the_node_at_once(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    request.cancel()
    await cluster.until(request.done)
    assert node.aborts == [submit.fence]
    at_rest(cluster)


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
    at_rest(cluster)


# --- overload and drain ---


@pytest.mark.conformance(61)
async def test_a_full_queue_is_overloaded_and_the_first_in_is_the_first_out(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue=1) as cluster:
        node = await cluster.join("decode-1")
        first = client.start(tokens_of(cluster, cluster.job()), "first")
        await node.submitted(1)
        second = client.start(tokens_of(cluster, cluster.job()), "second")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        with pytest.raises(Overloaded) as refused:
            await tokens_of(cluster, cluster.job())
        assert refused.value.retry_after_s == 1.0
        node.produce(node.submits[0].fence, 1, status=DONE)
        assert await first == [1]
        submit = await node.submitted(2)
        node.produce(submit.fence, 2, status=DONE)
        assert await second == [2]
        at_rest(cluster)


async def test_many_queued_requests_that_all_fail_at_once_end_one_by_one(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue=2000) as cluster:
        node = await cluster.join("decode-1")
        held = client.start(tokens_of(cluster, cluster.job()), "held")
        submit = await node.submitted()
        waiting = [client.start(tokens_of(cluster, cluster.job()), "waiting") for _ in range(1500)]
        await cluster.until(lambda: cluster.replica.in_flight() == 1501)
        node.beat(draining=True)
        await cluster.until(lambda: not cluster.replica.ready()[0])
        node.produce(submit.fence, 1, status=DONE)
        assert await held == [1]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results)
        at_rest(cluster)


async def test_one_request_id_is_in_flight_once(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    name = RequestID("mine")
    request, submit = await first_token(cluster, node, cluster.job(request_id=name), client)
    with pytest.raises(InvalidRequest, match="mine"):
        await tokens_of(cluster, cluster.job(request_id=name))
    node.produce(submit.fence, 8, status=DONE)
    assert await request == [7, 8]
    at_rest(cluster)


async def test_a_drain_lets_requests_end_and_takes_no_new_ones(client: Owner) -> None:
    async with running(drain_s=30.0) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await first_token(cluster, node, cluster.job(), client)
        drain = client.start(cluster.replica.drain(), "drain")
        await cluster.until(lambda: cluster.replica.dispatcher.draining)
        with pytest.raises(Unavailable, match="shutting down"):
            await tokens_of(cluster, cluster.job())
        assert cluster.replica.ready() == (
            False,
            "1 decode and 0 prefill nodes are usable; decode nodes compute the prompts; shutting down",
        )
        node.produce(submit.fence, 8, status=DONE)
        assert await request == [7, 8]
        await drain
        at_rest(cluster)


async def test_a_drain_whose_grace_is_over_fails_what_is_left(client: Owner) -> None:
    async with running(drain_s=0.03) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await first_token(cluster, node, cluster.job(), client)
        await cluster.replica.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            await request
        assert node.aborts == [submit.fence]
        at_rest(cluster)


@pytest.mark.conformance(68)
async def test_resetting_the_prefix_cache_reaches_every_node(cluster: Cluster) -> None:
    nodes = [await cluster.join("decode-1"), await cluster.join("prefill-1")]
    await cluster.replica.reset_prefix_cache()
    assert [node.dropped_caches for node in nodes] == [1, 1]
