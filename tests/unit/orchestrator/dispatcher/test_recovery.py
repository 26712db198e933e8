import pytest

from pipelines.types.eos import EOSTracker
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import (
    EngineDied,
    InternalError,
    NodeLost,
)
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running

DONE = GenerationStatus.END_OF_SEQUENCE


async def test_a_stream_whose_node_is_lost_goes_on_from_another_where_it_was(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    job = cluster.job(prompt_tokens=4)
    request, submit = await cluster.first_token(node, job, client)
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
    cluster.assert_at_rest()


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
    request, submit = await cluster.first_token(node, cluster.job(), client)
    node.refuses = NodeLost("it is gone")
    node.lose("killed")
    await cluster.until(lambda: cluster.replica.counters().get("stream_stranded") == 1)
    other = await cluster.join("decode-2")
    resumed = await other.submitted()
    other.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    cluster.assert_at_rest()


async def test_a_stream_that_finds_no_node_in_time_is_one_typed_error(client: Owner) -> None:
    async with running(migration_wait_s=0.1) as cluster:
        node = await cluster.join("decode-1")
        request, submit = await cluster.first_token(node, cluster.job(), client)
        node.refuses = NodeLost("it is gone")
        node.lose("killed")
        with pytest.raises(NodeLost, match="killed") as lost:
            await request
        assert lost.value.retry_after_s == 1.0
        cluster.assert_at_rest()


async def test_a_stream_goes_back_to_the_node_whose_session_was_only_cut(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
    node.lose("connection reset")
    resumed = await node.submitted(2)
    assert resumed.fence.attempt == 2
    node.produce(submit.fence, 99)
    node.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    cluster.assert_at_rest()


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
    cluster.assert_at_rest()


async def test_a_node_that_says_it_is_unhealthy_is_left_in_mid_stream(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
    other = await cluster.join("decode-2")
    node.beat(healthy=False)
    resumed = await other.submitted()
    assert node.aborts == [submit.fence]
    node.produce(submit.fence, 99)
    other.produce(resumed.fence, 8, status=DONE)
    assert await request == [7, 8]
    cluster.assert_at_rest()


async def test_an_error_that_no_node_could_mend_ends_a_stream(cluster: Cluster, client: Owner) -> None:
    node = await cluster.join("decode-1")
    request, submit = await cluster.first_token(node, cluster.job(), client)
    other = await cluster.join("decode-2")
    node.fail(submit.fence, InternalError("logits are not finite"))
    with pytest.raises(InternalError, match="finite"):
        await request
    assert other.submits == []
    cluster.assert_at_rest()


async def test_a_request_waits_a_moment_for_the_only_node_whose_session_has_just_broken(client: Owner) -> None:
    async with running(reconnect_wait_s=30.0) as cluster:
        node = await cluster.join("decode-1", answer=lambda submit: [[5]])
        node.refuses = NodeLost("not yet")
        node.lose("connection reset")
        await cluster.until(lambda: cluster.why_not("decode-1") == "not yet")
        request = client.start(cluster.tokens_of(cluster.job()), "request")
        await cluster.until(lambda: cluster.replica.counters().get("request_stranded") == 1)
        node.refuses = None
        assert await request == [5]
        cluster.assert_at_rest()
