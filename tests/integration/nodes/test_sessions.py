"""The session between an orchestrator and a node: hellos, beats, refusals."""

import grpc
import pytest
from grpc import aio

from pipelines.types.frames import DropPrefixCache, Submit
from pronghorn.ids import Fence, RequestID, new_incarnation
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Rig, at_rest, prompt, target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("oldest_protocol_version", 9),
        ("model", "another"),
        ("seed_digest", "another"),
        ("role", "decode"),
    ],
)
async def test_an_orchestrator_that_does_not_fit_is_refused_by_name(rig: Rig, field: str, value: object) -> None:
    decode, _ = await rig.decode()
    changes = {"protocol_version": 9} if field == "oldest_protocol_version" else {}
    with pytest.raises(aio.AioRpcError) as refused:
        await rig.orchestrator(decode, **{field: value}, **changes)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert field.removeprefix("oldest_") in str(refused.value.details())


async def test_garbage_ends_the_session_and_nothing_else(rig: Rig) -> None:
    decode, _ = await rig.decode()
    rude, polite = await rig.orchestrator(decode), await rig.orchestrator(decode)
    fence = await polite.submit(prompt(3), 30)
    await rude.send(b"\xff\xfe garbage")
    assert await polite.result(fence) == continuation(prompt(3), 30)
    await at_rest(decode)
    assert not polite.ended


async def test_beats_carry_the_gauges(rig: Rig) -> None:
    decode, _ = await rig.decode(num_blocks=16)
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.until(lambda: len(orchestrator.beats) >= 3)
    beat = orchestrator.beats[-1]
    assert (beat.name, beat.role, beat.address) == ("decode-1", "decode", decode.shell.address)
    assert beat.healthy and not beat.draining
    assert (beat.total_blocks, beat.free_blocks, beat.held_blocks) == (16, 16, 0)
    assert (await rig.status(decode)).incarnation == decode.shell.incarnation


async def test_a_request_for_an_earlier_life_is_refused(rig: Rig) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = Fence(RequestID(), 1, new_incarnation())
    await orchestrator.send(Submit(fence, canary_context(prompt(1)), 5.0))
    failure = await orchestrator.failure(fence)
    assert (failure.error.kind, failure.error.code) == ("NodeRefused", "wrong_incarnation")


async def test_a_prefill_node_takes_no_requests_from_orchestrators(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    orchestrator = await rig.orchestrator(prefill)
    fence = await orchestrator.submit(prompt(1), 4)
    failure = await orchestrator.failure(fence)
    assert (failure.error.kind, failure.error.code) == ("NodeRefused", "wrong_role")


async def test_the_same_attempt_said_twice_is_one_attempt(rig: Rig) -> None:
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    context = canary_context(prompt(2), 20)
    submit = Submit(Fence(context.request_id, 1, decode.shell.incarnation), context, 5.0)
    await orchestrator.send(submit)
    await orchestrator.send(submit)
    await orchestrator.until(lambda: orchestrator.beats[-1].counters.get("submit_repeated") == 1)
    engine.pipeline.gate.set()
    assert await orchestrator.result(submit.fence) == continuation(prompt(2), 20)


async def test_a_full_node_refuses_as_overloaded(rig: Rig) -> None:
    decode, engine = await rig.decode()
    engine.pipeline.gate.clear()
    orchestrator = await rig.orchestrator(decode)
    fences = [await orchestrator.submit(prompt(1, start=i), 2) for i in range(100)]
    await orchestrator.until(lambda: bool(orchestrator.failures))
    assert {failure.error.kind for failure in orchestrator.failures.values()} == {"Overloaded"}
    engine.pipeline.gate.set()
    await orchestrator.until(lambda: all(orchestrator.is_done(fence) for fence in fences))
    await at_rest(decode)


async def test_dropping_the_prefix_cache_makes_decode_ask_for_everything(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.result(await orchestrator.submit(prompt(3), 4))
    await orchestrator.send(DropPrefixCache())
    fence = await orchestrator.submit(prompt(3), 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(prompt(3), 4)
    assert prefill.counters.value("blocks_sent") == 4
