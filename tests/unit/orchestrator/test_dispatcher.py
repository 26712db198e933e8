import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from orchestrator.ports import GenerationJob
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import Abort, Outputs, Pulled, Submit
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import (
    DeadlineExceeded,
    EndpointNotFound,
    EngineDied,
    InsufficientBlocks,
    InternalError,
    InvalidRequest,
    NodeLost,
    NodeRefused,
    NoPrefill,
    Overloaded,
    PoisonRequest,
    PronghornError,
    RequestInProgress,
    TransferFailed,
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
    node.refuses = NodeLost("it is gone")
    node.lose("killed")
    with pytest.raises(NodeLost, match="killed") as lost:
        await asyncio.wait_for(asyncio.shield(request), 60)
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


async def test_a_stream_whose_node_is_lost_goes_on_from_another_where_it_was(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    job = cluster.job(prompt_tokens=4)
    request, submit = await first_token(cluster, node, job, client)
    node.produce(submit.fence, 8, 9)
    other = await cluster.join("decode-2")
    node.refuses = NodeLost("it is gone")
    node.lose("killed")
    resumed = await other.submitted()
    assert resumed.fence.attempt == 2
    assert resumed.context.tokens.all.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert resumed.context.original_prompt_length == 4
    assert resumed.context.tokens.active_length == 7
    assert (resumed.context.max_length, resumed.context.request_id) == (64, job.context.request_id)
    assert job.context.tokens.all.tolist() == [1, 2, 3, 4], "what the API counts is left alone"
    other.produce(resumed.fence, 10, cached=4)
    other.produce(resumed.fence, 2, status=DONE)
    assert await request == [7, 8, 9, 10, 2]
    assert cluster.replica.counters()["stream_migrated"] == 1
    at_rest(cluster)


async def test_usage_tells_what_of_the_prompt_was_cached_whatever_the_second_node_finds(
    cluster: Cluster, client: Owner
) -> None:
    first = await cluster.join("decode-1")
    outputs: list[TextGenerationOutput] = []

    async def collect() -> None:
        async with cluster.replica.generate(cluster.job()) as stream:
            outputs.extend([output async for output in stream])

    request = client.start(collect(), "request")
    submit = await first.submitted()
    first.produce(submit.fence, 7, cached=2)
    first.produce(submit.fence, 8)
    second = await cluster.join("decode-2")
    first.fail(submit.fence, EngineDied("gone"))
    resumed = await second.submitted()
    second.produce(resumed.fence, 9, cached=5)
    second.produce(resumed.fence, 2, status=DONE)
    await request
    assert [output.num_cached_tokens for output in outputs] == [2, None, None, None]
    assert [token for output in outputs for token in output.tokens] == [7, 8, 9, 2]


async def test_a_stream_waits_for_a_node_and_goes_on_from_the_first_that_comes(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    node.refuses = NodeLost("it is gone")
    node.lose("killed")
    await cluster.until(lambda: cluster.replica.counters().get("stream_stranded") == 1)
    other = await cluster.join("decode-2")
    resumed = await other.submitted()
    other.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    at_rest(cluster)


async def test_a_stream_that_finds_no_node_in_time_is_one_typed_error(client: Owner) -> None:
    async with running(migration_wait_s=0.1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await first_token(cluster, node, cluster.job(), client)
        node.refuses = NodeLost("it is gone")
        node.lose("killed")
        with pytest.raises(NodeLost, match="killed") as lost:
            await request
        assert lost.value.retry_after_s == 1.0
        at_rest(cluster)


async def test_a_stream_goes_back_to_the_node_whose_session_was_only_cut(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    node.lose("connection reset")
    resumed = await node.submitted(2)
    assert resumed.fence.attempt == 2
    node.produce(submit.fence, 99)
    node.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    at_rest(cluster)


@pytest.mark.parametrize(("end", "status"), [({"eos": 7}, DONE), ({"max_length": 5}, GenerationStatus.MAXIMUM_LENGTH)])
async def test_a_stream_whose_last_token_came_and_whose_last_word_did_not_is_finished(
    cluster: Cluster, client: Owner, end: dict[str, int], status: GenerationStatus
) -> None:
    node = await cluster.join("decode-1")
    job = cluster.job(prompt_tokens=4)
    job.context.max_length = end.get("max_length", 64)
    job.context.eos_tracker = EOSTracker(eos_token_ids={end.get("eos", 999)})
    outputs: list[TextGenerationOutput] = []

    async def collect() -> None:
        async with cluster.replica.generate(job) as stream:
            outputs.extend([output async for output in stream])

    request = client.start(collect(), "request")
    submit = await node.submitted()
    node.produce(submit.fence, 7)
    node.lose("killed")
    await request
    assert [output.tokens for output in outputs] == [[7], []]
    assert outputs[-1].final_status is status
    assert len(node.submits) == 1
    at_rest(cluster)


async def test_a_node_that_says_it_is_unhealthy_is_left_in_mid_stream(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    other = await cluster.join("decode-2")
    node.beat(healthy=False)
    resumed = await other.submitted()
    assert node.aborts == [submit.fence]
    node.produce(submit.fence, 99)
    other.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    at_rest(cluster)


async def test_an_error_that_no_node_could_mend_ends_a_stream(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    other = await cluster.join("decode-2")
    node.fail(submit.fence, InternalError("logits are not finite"))
    with pytest.raises(InternalError, match="finite"):
        await request
    assert other.submits == []
    at_rest(cluster)


async def test_a_request_waits_a_moment_for_the_only_node_whose_session_has_just_broken(client: Owner) -> None:
    async with running(reconnect_wait_s=30.0) as cluster:
        node = await cluster.join("decode-1", answer=lambda submit: [[5]])
        node.refuses = NodeLost("not yet")
        node.lose("connection reset")
        await cluster.until(lambda: cluster.why_not("decode-1") == "not yet")
        request = client.start(tokens_of(cluster, cluster.job()), "request")
        await cluster.until(lambda: cluster.replica.counters().get("request_stranded") == 1)
        node.refuses = None
        assert await request == [5]
        at_rest(cluster)


# --- poison ---


async def test_a_request_under_which_two_nodes_die_is_tried_no_more(cluster: Cluster, client: Owner) -> None:
    nodes = [await cluster.join(f"decode-{i}") for i in range(3)]
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    for count in (1, 2):
        await cluster.until(lambda: sum(len(node.submits) for node in nodes) == count)  # noqa: B023
        (node,) = [n for n in nodes if n.submits and n.submits[-1].fence.attempt == count]
        assert node.submits[-1].deaths == count - 1
        node.fail(node.submits[-1].fence, EngineDied("killed by SIGSEGV"))
    with pytest.raises(PoisonRequest) as poison:
        await request
    assert (poison.value.code, poison.value.http_status) == ("poison_request", 500)
    assert sum(len(node.submits) for node in nodes) == 2
    at_rest(cluster)


async def test_a_prefill_engine_and_a_decode_engine_that_die_make_two(cluster: Cluster, client: Owner) -> None:
    prefill = await cluster.join("prefill-1")
    nodes = [await cluster.join(f"decode-{i}") for i in range(2)]
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    await cluster.until(lambda: any(node.submits for node in nodes))
    (node,) = [n for n in nodes if n.submits]
    (submit,) = node.submits
    node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation, EngineDied("gone").record())]))
    node.fail(submit.fence, EngineDied("gone"))
    with pytest.raises(PoisonRequest):
        await request
    at_rest(cluster)


async def test_a_machine_that_takes_both_its_nodes_with_it_is_one_death(cluster: Cluster, client: Owner) -> None:
    """The decode node first, and then the prefill node that the request was sent to next."""
    prefill = await cluster.join("prefill-1", address="127.0.0.3:1")
    lost = await cluster.join("decode-1", address="127.0.0.3:2")
    request = client.start(tokens_of(cluster, cluster.job()), "request")
    await lost.submitted(1)
    other = await cluster.join("decode-2", address="127.0.0.4:2")
    lost.lose("connection reset")
    await other.submitted(1)
    reset = NodeLost("connection reset").record()
    other.say(Outputs([], [], [Pulled(other.submits[0].fence, prefill.record.incarnation, reset)]))
    prefill.refuses = lost.refuses = NodeLost("nobody listens there")
    prefill.lose("connection reset")
    await cluster.until(lambda: cluster.why_not("prefill-1") is not None)
    other.produce(other.submits[-1].fence, 8, status=DONE)
    assert await request == [8]
    assert len(other.submits) == 1
    at_rest(cluster)


async def test_sessions_that_broke_and_came_back_are_no_deaths(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(), client)
    for count in (2, 3):
        node.lose("connection reset")
        await node.submitted(count)
    node.produce(node.submits[-1].fence, 8, status=DONE)
    assert await request == [7, 8]


# --- breakers and the prefill pool ---


async def failing_prefill(cluster: Cluster, client: Owner, count: int) -> None:
    """So many requests whose hand-over from prefill-1 fails."""
    node, prefill = cluster["decode-1"], cluster["prefill-1"]
    for _ in range(count):
        before = len(node.submits)
        request = client.start(tokens_of(cluster, cluster.job()), "request")
        submit = await node.submitted(before + 1)
        node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation, TransferFailed("torn").record())]))
        node.produce(submit.fence, 5, status=DONE)
        assert await request == [5]


async def test_a_prefill_node_that_keeps_failing_is_asked_no_more_and_a_trial_brings_it_back(client: Owner) -> None:
    async with running(breaker_failures=2, breaker_open_s=0.05) as cluster:
        node, prefill = await cluster.join("decode-1"), await cluster.join("prefill-1")
        await failing_prefill(cluster, client, 2)
        assert (cluster.why_not("prefill-1") or "").startswith("breaker open after 2 failures")
        await cluster.until(lambda: cluster.why_not("prefill-1") is None)
        trial = client.start(tokens_of(cluster, cluster.job()), "trial")
        submit = await node.submitted(3)
        assert [target.name for target in submit.prefill] == ["prefill-1"]
        assert cluster.why_not("prefill-1") == "breaker half open, one request tries it"
        node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation)]))
        node.produce(submit.fence, 5, status=DONE)
        assert await trial == [5]
        assert cluster.why_not("prefill-1") is None


@pytest.mark.field("sglang#31206")
async def test_with_every_breaker_open_and_no_room_on_decode_nothing_is_dispatched(client: Owner) -> None:
    """sglang#31206: the breaker was open for prefill, and decode was dispatched to all the same."""
    async with running(breaker_failures=2, breaker_open_s=30.0) as cluster:
        node = await cluster.join("decode-1")
        await cluster.join("prefill-1")
        await failing_prefill(cluster, client, 2)
        node.beat(local_prefill_room_tokens=3)
        await cluster.until(lambda: cluster.room("decode-1") == 3)
        with pytest.raises(NoPrefill, match="room to compute 3 prompt tokens") as refused:
            await tokens_of(cluster, cluster.job(prompt_tokens=4))
        assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1.0)
        assert len(node.submits) == 2, "only what came before"
        assert cluster.replica.counters()["prefill_fallback.refused"] == 1
        node.answer = lambda submit: [[5]]
        assert await tokens_of(cluster, cluster.job(prompt_tokens=3)) == [5]
        assert cluster.replica.counters()["prefill_fallback.local"] == 1
        with pytest.raises(NoPrefill):  # what was sent since the last beat counts
            await tokens_of(cluster, cluster.job(prompt_tokens=1))
        at_rest(cluster)


async def test_what_clients_do_wrong_opens_no_breaker(client: Owner) -> None:
    async with running(breaker_failures=1) as cluster:
        node = await cluster.join("decode-1")
        request = client.start(tokens_of(cluster, cluster.job()), "request")
        submit = await node.submitted()
        node.fail(submit.fence, InvalidRequest("bad"))
        with pytest.raises(InvalidRequest):
            await request
        assert cluster.why_not("decode-1") is None


# --- the same request twice ---


async def test_a_key_that_runs_is_refused_and_free_again_at_its_end(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await first_token(cluster, node, cluster.job(key="mine"), client)
    assert submit.key == "mine"
    with pytest.raises(RequestInProgress, match="mine") as refused:
        await tokens_of(cluster, cluster.job(key="mine"))
    assert (refused.value.http_status, refused.value.retry_after_s) == (409, 1.0)
    assert len(node.submits) == 1
    node.produce(submit.fence, 8, status=DONE)
    assert await request == [7, 8]
    node.answer = lambda submit: [[5]]
    assert await tokens_of(cluster, cluster.job(key="mine")) == [5]
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


async def test_an_urgent_request_takes_a_place_in_the_full_queue_and_comes_first(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue=2) as cluster:
        node = await cluster.join("decode-1")
        running_now = client.start(tokens_of(cluster, cluster.job()), "running")
        await node.submitted(1)
        waiting = client.start(tokens_of(cluster, cluster.job()), "waiting")
        await cluster.until(lambda: cluster.replica.in_flight() == 2)
        displaced = asyncio.ensure_future(tokens_of(cluster, cluster.job()))
        await cluster.until(lambda: cluster.replica.in_flight() == 3)
        urgent = client.start(tokens_of(cluster, replace(cluster.job(), priority=-1)), "urgent")
        with pytest.raises(Overloaded, match="more right"):
            await displaced
        for number, request in enumerate((running_now, urgent, waiting), start=1):
            submit = await node.submitted(number)
            node.produce(submit.fence, number, status=DONE)
            assert await request == [number]
        assert cluster.replica.counters()["request_shed.displaced"] == 1
        at_rest(cluster)


async def test_who_has_waited_as_long_as_one_may_is_told_so(client: Owner) -> None:
    async with running(max_in_flight=1, max_queue_wait_s=0.05) as cluster:
        node = await cluster.join("decode-1")
        first = client.start(tokens_of(cluster, cluster.job()), "first")
        submit = await node.submitted(1)
        with pytest.raises(Overloaded, match="did not come within 0.05 s"):
            await tokens_of(cluster, cluster.job())
        node.produce(submit.fence, 1, status=DONE)
        assert await first == [1]
        at_rest(cluster)


async def test_many_queued_requests_that_all_fail_at_once_end_one_by_one(client: Owner) -> None:
    patience_s = 600.0
    bounds = {"heartbeat_timeout_s": patience_s, "silence_timeout_s": patience_s}
    async with running(max_in_flight=1, max_queue=2000, **bounds) as cluster:
        node = await cluster.join("decode-1")
        held = client.start(tokens_of(cluster, cluster.job(budget_s=patience_s)), "held")
        submit = await node.submitted()
        jobs = [cluster.job(budget_s=patience_s) for _ in range(1500)]
        waiting = [client.start(tokens_of(cluster, job), "waiting") for job in jobs]
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
