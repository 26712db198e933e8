import pytest

from pipelines.types.frames import Outputs, Pulled
from pipelines.types.status import GenerationStatus
from pronghorn.errors import (
    EngineDied,
    InvalidRequest,
    NodeLost,
    NoPrefill,
    PoisonRequest,
    TransferFailed,
)
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


# --- poison ---


async def test_a_request_under_which_two_nodes_die_is_tried_no_more(cluster: Cluster, client: Owner) -> None:
    nodes = [await cluster.join(f"decode-{i}") for i in range(3)]
    request = client.start(cluster.tokens_of(cluster.job()), "request")
    for count in (1, 2):
        await cluster.until(lambda: sum(len(node.submits) for node in nodes) == count)  # noqa: B023
        (node,) = [n for n in nodes if n.submits and n.submits[-1].fence.attempt == count]
        assert node.submits[-1].deaths == count - 1
        node.fail(node.submits[-1].fence, EngineDied("killed by SIGSEGV"))
    with pytest.raises(PoisonRequest) as poison:
        await request
    assert (poison.value.code, poison.value.http_status) == ("poison_request", 500)
    assert sum(len(node.submits) for node in nodes) == 2
    cluster.assert_at_rest()


async def test_a_prefill_engine_and_a_decode_engine_that_die_make_two(cluster: Cluster, client: Owner) -> None:
    prefill = await cluster.join("prefill-1")
    nodes = [await cluster.join(f"decode-{i}") for i in range(2)]
    request = client.start(cluster.tokens_of(cluster.job()), "request")
    await cluster.until(lambda: any(node.submits for node in nodes))
    (node,) = [n for n in nodes if n.submits]
    (submit,) = node.submits
    node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation, EngineDied("gone").record())]))
    node.fail(submit.fence, EngineDied("gone"))
    with pytest.raises(PoisonRequest):
        await request
    cluster.assert_at_rest()


async def test_a_machine_that_takes_both_its_nodes_with_it_is_one_death(cluster: Cluster, client: Owner) -> None:
    """The decode node first, and then the prefill node that the request was sent to next."""
    prefill = await cluster.join("prefill-1", address="127.0.0.3:1")
    lost = await cluster.join("decode-1", address="127.0.0.3:2")
    request = client.start(cluster.tokens_of(cluster.job()), "request")
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
    cluster.assert_at_rest()


async def test_sessions_that_broke_and_came_back_are_no_deaths(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
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
        request = client.start(cluster.tokens_of(cluster.job()), "request")
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
        trial = client.start(cluster.tokens_of(cluster.job()), "trial")
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
            await cluster.tokens_of(cluster.job(prompt_tokens=4))
        assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1.0)
        assert len(node.submits) == 2, "only what came before"
        assert cluster.replica.counters()["prefill_fallback.refused"] == 1
        node.answer = lambda submit: [[5]]
        assert await cluster.tokens_of(cluster.job(prompt_tokens=3)) == [5]
        assert cluster.replica.counters()["prefill_fallback.local"] == 1
        with pytest.raises(NoPrefill):  # what was sent since the last beat counts
            await cluster.tokens_of(cluster.job(prompt_tokens=1))
        cluster.assert_at_rest()


async def test_what_clients_do_wrong_opens_no_breaker(client: Owner) -> None:
    async with running(breaker_failures=1) as cluster:
        node = await cluster.join("decode-1")
        request = client.start(cluster.tokens_of(cluster.job()), "request")
        submit = await node.submitted()
        node.fail(submit.fence, InvalidRequest("bad"))
        with pytest.raises(InvalidRequest):
            await request
        assert cluster.why_not("decode-1") is None
