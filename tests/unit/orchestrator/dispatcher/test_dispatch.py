import asyncio

import pytest

from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import (
    EndpointNotFound,
    InsufficientBlocks,
    NodeLost,
    NodeRefused,
    Overloaded,
    PronghornError,
    RequestInProgress,
    Unavailable,
)
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


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
    cluster.assert_at_rest()


async def test_nothing_is_aborted_after_the_end(cluster: Cluster) -> None:
    node = await cluster.join("decode-1", answer=lambda submit: [[5]])
    assert await cluster.tokens_of(cluster.job()) == [5]
    assert node.aborts == []


async def test_requests_spread_over_the_decode_nodes(cluster: Cluster, client: Owner) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    for _ in range(4):
        client.start(cluster.tokens_of(cluster.job()), "request")
    await first.submitted(2)
    await second.submitted(2)
    for node in (first, second):
        for submit in node.submits:
            node.produce(submit.fence, 1, status=DONE)
    await cluster.until(lambda: client.running == [])
    cluster.assert_at_rest()


async def test_a_named_endpoint_is_carried_to_the_node_as_the_only_one(cluster: Cluster) -> None:
    await cluster.join("prefill-1")
    await cluster.join("prefill-2")
    node = await cluster.join("decode-1", answer=lambda submit: [[5]])
    await cluster.tokens_of(cluster.job(target_endpoint="prefill-2"))
    (submit,) = node.submits
    assert [target.name for target in submit.prefill] == ["prefill-2"]
    assert submit.only_these


@pytest.mark.conformance(44)
async def test_an_endpoint_that_does_not_exist_is_decided_before_anything_is_sent(cluster: Cluster) -> None:
    node = await cluster.join("decode-1")
    with pytest.raises(EndpointNotFound):
        await cluster.tokens_of(cluster.job(target_endpoint="tcp://10.0.0.1:80"))
    assert node.submits == []
    cluster.assert_at_rest()


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
    assert await cluster.tokens_of(cluster.job(hint=hint)) == [5]
    assert cluster.replica.counters()[f"cache_hint_miss.{reason}"] == 1
    assert node.submits[0].context.external_block_metadata == hint


async def test_a_usable_hint_is_no_miss(cluster: Cluster) -> None:
    await cluster.join("decode-1", answer=lambda submit: [[5]])
    hint: dict[str, object] = {
        "version": 1,
        "instances": [{"name": "decode-1", "blocks": 1, "last_hash": "0" * 16}],
    }
    await cluster.tokens_of(cluster.job(hint=hint))
    assert not any(name.startswith("cache_hint_miss") for name in cluster.replica.counters())


# --- before the first token ---


async def test_without_a_decode_node_it_is_unavailable(cluster: Cluster) -> None:
    with pytest.raises(Unavailable) as refused:
        await cluster.tokens_of(cluster.job())
    assert refused.value.retry_after_s == 1.0
    cluster.assert_at_rest()


@pytest.mark.parametrize("error", [NodeRefused("draining"), InsufficientBlocks("full"), Overloaded("queue full")])
async def test_a_node_that_refuses_is_followed_by_another(
    cluster: Cluster, client: Owner, error: PronghornError
) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    request = client.start(cluster.tokens_of(cluster.job()), "request")
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
    cluster.assert_at_rest()


async def test_a_node_that_is_lost_before_the_first_token_is_followed_by_another(
    cluster: Cluster, client: Owner
) -> None:
    first, second = await cluster.join("decode-1"), await cluster.join("decode-2")
    request = client.start(cluster.tokens_of(cluster.job()), "request")
    await cluster.until(lambda: bool(first.submits or second.submits))
    lost, other = (first, second) if first.submits else (second, first)
    lost.lose()
    submit = await other.submitted()
    other.produce(submit.fence, 8, status=DONE)
    assert await request == [8]
    cluster.assert_at_rest()


async def test_the_only_node_lost_before_the_first_token_is_one_typed_error(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request = client.start(cluster.tokens_of(cluster.job()), "request")
    await node.submitted()
    node.refuses = NodeLost("it is gone")
    node.lose("killed")
    with pytest.raises(NodeLost, match="killed") as lost:
        await asyncio.wait_for(asyncio.shield(request), 60)
    assert lost.value.retry_after_s == 1.0
    cluster.assert_at_rest()


async def test_a_node_that_does_not_read_is_passed_over(client: Owner) -> None:
    async with running() as cluster:
        stuck = await cluster.join("decode-1")
        stuck.reading, stuck.send_queue_frames = False, 0
        await cluster.join("decode-2", answer=lambda submit: [[5]])
        assert await cluster.tokens_of(cluster.job()) == [5]
        assert await cluster.tokens_of(cluster.job()) == [5]
        cluster.assert_at_rest()


async def test_attempts_are_bounded(cluster: Cluster) -> None:
    nodes = [await cluster.join(f"decode-{i}") for i in range(5)]
    for node in nodes:
        node.reading, node.send_queue_frames = False, 0
    with pytest.raises(Overloaded) as refused:
        await cluster.tokens_of(cluster.job())
    assert refused.value.retry_after_s == 1.0
    assert cluster.replica.counters()["request_retried"] == 2
    cluster.assert_at_rest()


# --- the same request twice ---


async def test_a_key_that_runs_is_refused_and_free_again_at_its_end(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(key="mine"), client)
    assert submit.key == "mine"
    with pytest.raises(RequestInProgress, match="mine") as refused:
        await cluster.tokens_of(cluster.job(key="mine"))
    assert (refused.value.http_status, refused.value.retry_after_s) == (409, 1.0)
    assert len(node.submits) == 1
    node.produce(submit.fence, 8, status=DONE)
    assert await request == [7, 8]
    node.answer = lambda submit: [[5]]
    assert await cluster.tokens_of(cluster.job(key="mine")) == [5]
    cluster.assert_at_rest()


async def test_late_messages_are_counted_and_change_nothing(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
    node.produce(submit.fence.__class__(submit.fence.request_id, 9, submit.fence.incarnation), 99)
    node.produce(submit.fence, 8, status=DONE)
    node.produce(submit.fence, 99)
    node.fail(submit.fence, NodeRefused("late"))
    assert await request == [7, 8]
    await cluster.until(lambda: cluster.replica.counters().get("message_refused.ended") == 2)
    assert cluster.replica.counters()["message_refused.late"] == 1
    cluster.assert_at_rest()
