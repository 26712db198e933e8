import asyncio
import json
import logging

import msgspec
import pytest

from orchestrator.explanation import Explanations, RequestRecord
from orchestrator.routing.facts import Candidate, Choice, Pair, Route
from pipelines.types.frames import Delta, Outputs, Pulled
from pipelines.types.status import GenerationStatus
from pronghorn.errors import NodeRefused, TransferFailed
from pronghorn.ids import RequestID
from pronghorn.tasks import Owner
from tests.fakes.orchestrator_cluster import Cluster, running
from tests.fakes.routers import view


async def read(cluster: Cluster, request_id: RequestID) -> None:
    async with cluster.replica.generate(cluster.job(request_id=request_id)) as outputs:
        async for _ in outputs:
            pass


async def test_a_record_tells_the_choice_the_attempts_and_what_came_of_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pronghorn.requests")
    request_id, client = RequestID(), Owner("client")
    async with running() as cluster:
        nodes = [await cluster.join("decode-1"), await cluster.join("decode-2")]
        task = client.start(read(cluster, request_id), "request")
        await cluster.until(lambda: any(node.submits for node in nodes))
        nodes.sort(key=lambda node: not node.submits)
        nodes[0].fail(nodes[0].submits[0].fence, NodeRefused("no"))
        fence = (await nodes[1].submitted()).fence
        record = cluster.replica.explain(str(request_id))
        assert record is not None and record.outcome == "running" and record.retries == 1
        nodes[1].produce(fence, 1, cached=2)
        nodes[1].produce(fence, 2, status=GenerationStatus.END_OF_SEQUENCE)
        await asyncio.wait_for(task, 60)
        record = cluster.replica.explain(str(request_id))
        assert record is not None
        assert [attempt.considered[0].decode for attempt in record.attempts] == [node.record.name for node in nodes]
        assert [attempt.ended for attempt in record.attempts] == ["AttemptFailed", None]
        assert (record.reused_tokens, record.output_tokens, record.outcome) == (2, 2, "finished")
        assert record.first_token_s is not None and record.ended_s is not None
    (line,) = [r.getMessage() for r in caplog.records if r.name == "pronghorn.requests"]
    assert json.loads(line)["request_id"] == str(request_id)
    await client.stop(1.0)


async def test_bytes_moved_are_those_that_the_decode_node_counted_failed_hand_overs_included() -> None:
    request_id, client = RequestID(), Owner("client")
    async with running() as cluster:
        node, prefill = await cluster.join("decode-1"), await cluster.join("prefill-1")
        task = client.start(read(cluster, request_id), "request")
        submit = await node.submitted()
        torn = TransferFailed("torn").record()
        node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation, torn, 300)]))
        node.say(Outputs([], [], [Pulled(submit.fence, prefill.record.incarnation, None, 4000)]))
        node.produce(submit.fence, 5, status=GenerationStatus.END_OF_SEQUENCE)
        await asyncio.wait_for(task, 60)
        record = cluster.replica.explain(str(request_id))
        assert record is not None
        (attempt,) = record.attempts
        assert attempt.moved_bytes == 4300 and attempt.predicted_bytes > 0
    await client.stop(1.0)


async def test_bytes_that_were_fetched_are_told_by_their_source() -> None:
    request_id, client = RequestID(), Owner("client")
    async with running() as cluster:
        node = await cluster.join("decode-1")
        task = client.start(read(cluster, request_id), "request")
        submit = await node.submitted()
        late = msgspec.structs.replace(submit.fence, attempt=submit.fence.attempt + 7)
        for fence, tokens, fetched_bytes in (
            (late, [], {"decode-9": 1}),
            (submit.fence, [5], {"decode-2": 300, "host": 10}),
            (submit.fence, [6], {"decode-2": 4000}),
        ):
            node.say(Outputs([Delta(fence, tokens, fetched_bytes=fetched_bytes)]))
        node.produce(submit.fence, 7, status=GenerationStatus.END_OF_SEQUENCE)
        await asyncio.wait_for(task, 60)
        record = cluster.replica.explain(str(request_id))
        assert record is not None
        assert record.attempts[-1].fetched_bytes == {"decode-2": 4300, "host": 10}
    await client.stop(1.0)


def test_a_record_tells_what_would_have_to_be_brought_back_from_which_tier() -> None:
    explanations, request_id = Explanations(), RequestID("a")
    explanations.accepted(RequestRecord("a", "tiny", 100), 0.0)
    here = Candidate(view("decode-1"), reuse_tokens=16, host_tokens=32, disk_tokens=8)
    pairs = (Pair(here, None), Pair(here, Candidate(view("prefill-1"), reuse_tokens=16)))
    explanations.routed(request_id, Route(view("decode-1"), choice=Choice("kv_aware", pairs)), 2.0, 1.0)
    record = explanations.find("a")
    assert record is not None
    first, second = record.attempts[0].considered
    assert (first.reuse_tokens, first.tier_tokens) == (56, {"host": 32, "disk": 8})
    assert (second.reuse_tokens, second.tier_tokens) == (16, {})
    told = json.loads(msgspec.json.encode(record))["attempts"][0]["considered"]
    assert told[0]["tier_tokens"] == {"host": 32, "disk": 8} and "tier_tokens" not in told[1]


def test_only_the_latest_are_kept() -> None:
    explanations = Explanations(kept=2)
    for name in "abc":
        explanations.accepted(RequestRecord(name, "tiny", 1), 0.0)
    assert explanations.find("a") is None and explanations.find("c") is not None
    explanations.ended(RequestID("a"), "finished", None, 1.0)
