"""Whoever asked goes away, or time runs out, in each phase: everything returns to rest, on both sides."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from decode_nodes.node import DecodeNode
from kvcache import transfer
from pronghorn.ids import Fence
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import BLOCK_TOKENS, Orchestrator, Rig, at_rest, holds, lets_go, prompt, target
from tests.integration.nodes.test_faults import before

TOKENS = prompt(5)
NEW_TOKENS = 200
STEP_TOKENS = 2 * BLOCK_TOKENS
"""What an engine of the rig computes in one step."""


async def abort(orchestrator: Orchestrator, fence: Fence) -> None:
    await orchestrator.abort(fence)


async def die(orchestrator: Orchestrator, fence: Fence) -> None:
    orchestrator.die()


async def close(orchestrator: Orchestrator, fence: Fence) -> None:
    await orchestrator.close()


Going = Callable[[Orchestrator, Fence], Awaitable[None]]


def ended_early(*nodes: DecodeNode) -> int:
    return sum(node.counters.value("aborted") + node.counters.value("orphaned") for node in nodes)


goings = pytest.mark.parametrize("go", [abort, die, close])


@pytest.mark.cells("F12 P2", "F16 P2")
@pytest.mark.field("dynamo#7489")
@pytest.mark.conformance(45)
@goings
async def test_while_it_waits_for_blocks(rig: Rig, go: Going) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode(num_blocks=8)
    other = await rig.orchestrator(decode)
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    large = await other.submit(prompt(5), 8, target(prefill))
    await holds(prefill)
    fence = await orchestrator.submit(prompt(6, start=500), 4, target(prefill))
    await other.until(lambda: other.beats[-1].waiting == 1)
    await go(orchestrator, fence)
    await lets_go(decode, keeping=1)
    engine.pipeline.gate.set()
    assert await other.result(large) == continuation(prompt(5), 8)
    await at_rest(prefill, decode)
    assert ended_early(decode) == 1 and prefill.counters.value("hand_over_ended", "committed") == 1


@pytest.mark.cells("F12 P3", "F16 P3")
@pytest.mark.field("dynamo#7489")
@pytest.mark.conformance(45)
@goings
async def test_while_its_prompt_is_computed_there(rig: Rig, go: Going) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, target(prefill))
    await holds(prefill)
    await go(orchestrator, fence)
    await lets_go(prefill)
    engine.pipeline.gate.set()
    await at_rest(prefill, decode)
    assert orchestrator.tokens(fence) == [] and ended_early(decode) == 1
    assert prefill.counters.value("hand_over_ended", "computing") == 1


@pytest.mark.cells("F12 P5", "F12 P7", "F16 P5", "F16 P7")
@pytest.mark.field("dynamo#7489", "llm-d#1138")
@goings
@pytest.mark.parametrize("kind", [transfer.BlocksFrame, transfer.CommitFrame])
async def test_while_its_blocks_are_on_their_way(rig: Rig, go: Going, kind: type) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    reached, never = asyncio.Event(), asyncio.Event()

    async def stands_still() -> None:
        reached.set()
        await never.wait()

    front = await rig.in_front_of(prefill, before(kind, stands_still))
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, front.target)
    await reached.wait()
    await go(orchestrator, fence)
    await at_rest(prefill, decode)
    assert ended_early(decode) == 1 and engine.pipeline.computed_tokens == 0
    assert prefill.counters.value("hand_over_ended", "committed") == 0 or kind is transfer.CommitFrame


@pytest.mark.field("dynamo#7489", "llm-d#1138")
@goings
async def test_when_its_blocks_are_there_and_the_engine_has_not_taken_it_in(rig: Rig, go: Going) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    other, orchestrator = await rig.orchestrator(decode), await rig.orchestrator(decode)
    reached, goes_on = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        reached.set()
        await goes_on.wait()

    front = await rig.in_front_of(prefill, before(transfer.CommitFrame, waits))
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, front.target)
    await reached.wait()
    engine.pipeline.gate.clear()
    kept = await other.submit(prompt(1, start=9), 3)
    await holds(decode, 2)
    goes_on.set()
    async with asyncio.timeout(60.0):
        while decode.counters.value("pull_committed") == 0:  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.001)
    await go(orchestrator, fence)
    await lets_go(decode, keeping=1)
    engine.pipeline.gate.set()
    assert await other.result(kept) == continuation(prompt(1, start=9), 3)
    await at_rest(prefill, decode)
    assert ended_early(decode) == 1
    assert engine.pipeline.computed_tokens <= BLOCK_TOKENS + 1 + 3 + 1, "at most one step of what was let go of"


@pytest.mark.field("dynamo#13691")
@goings
async def test_an_engine_hears_of_it_before_its_next_step(rig: Rig, go: Going) -> None:
    prefill, engine = await rig.prefill(num_blocks=256)
    decode, _ = await rig.decode(num_blocks=256)
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(prompt(100), 4, target(prefill))
    await holds(prefill)
    await go(orchestrator, fence)
    await lets_go(prefill)
    engine.pipeline.gate.set()
    await at_rest(prefill, decode)
    assert engine.pipeline.computed_tokens <= STEP_TOKENS


@pytest.mark.field("dynamo#13691")
@goings
async def test_the_next_short_request_does_not_wait_behind_a_long_prompt_that_nobody_wants(rig: Rig, go: Going) -> None:
    prefill, engine = await rig.prefill(num_blocks=256)
    decode, _ = await rig.decode(num_blocks=256)
    leaving, orchestrator = await rig.orchestrator(decode), await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    long = await leaving.submit(prompt(100), 4, target(prefill))
    await holds(prefill)
    await go(leaving, long)
    await lets_go(prefill)
    short = prompt(1, start=500)
    fence = await orchestrator.submit(short, 2, target(prefill))
    await holds(prefill)
    engine.pipeline.gate.set()
    assert await orchestrator.result(fence) == continuation(short, 2)
    assert engine.pipeline.computed_tokens <= STEP_TOKENS + len(short), "the ghost was computed first"
    await at_rest(prefill, decode)


@pytest.mark.field("vllm#58188")
async def test_prefill_keeps_nothing_of_what_decode_has_taken_over(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(model_path="canary:?step_s=0.02")
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 100, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.tokens(fence)) >= 2)
    await at_rest(prefill)
    assert not orchestrator.is_done(fence), "decode runs, and prefill is at rest"
    await orchestrator.abort(fence)
    await at_rest(decode)


@pytest.mark.field("vllm#38027")
async def test_a_decode_node_that_takes_its_blocks_slowly_loses_none_of_them(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode(stall_timeout_s=1.0)
    orchestrator = await rig.orchestrator(decode)

    async def late() -> None:
        await asyncio.sleep(0.2)  # well within the bound each time, and beyond it together

    front = await rig.in_front_of(prefill, before(transfer.BlocksFrame, late))
    fence = await orchestrator.submit(prompt(20), 4, front.target)
    assert await orchestrator.result(fence) == continuation(prompt(20), 4)
    assert decode.counters.value("pull_committed") == 1 and engine.pipeline.computed_tokens == 3
    await at_rest(prefill, decode)


@pytest.mark.cells("F12 P10", "F16 P10")
@pytest.mark.field("dynamo#7489")
@pytest.mark.conformance(45, 70)
@goings
async def test_while_it_is_decoded(rig: Rig, go: Going) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode(model_path="canary:?step_s=0.05")
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 200, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.tokens(fence)) >= 3)
    await go(orchestrator, fence)
    await at_rest(prefill, decode)
    assert ended_early(decode) == 1 and engine.pipeline.computed_tokens < 200
    said = orchestrator.tokens(fence)
    assert said == continuation(TOKENS, 200)[: len(said)] and len(said) < 200


async def test_one_orchestrator_that_dies_leaves_the_others_alone(rig: Rig) -> None:
    decode, _ = await rig.decode(model_path="canary:?step_s=0.02")
    dying, living = await rig.orchestrator(decode), await rig.orchestrator(decode)
    lost = await dying.submit(TOKENS, 400)
    kept = await living.submit(prompt(3, start=9), 40)
    await dying.until(lambda: bool(dying.tokens(lost)))
    dying.die()
    assert await living.result(kept) == continuation(prompt(3, start=9), 40)
    await at_rest(decode)
    assert ended_early(decode) == 1


async def test_an_orchestrator_cannot_abort_what_another_asked_for(rig: Rig) -> None:
    decode, _ = await rig.decode()
    one, two = await rig.orchestrator(decode), await rig.orchestrator(decode)
    fence = await one.submit(TOKENS, 30)
    await two.abort(fence)
    assert await one.result(fence) == continuation(TOKENS, 30)


@pytest.mark.conformance(46)
@pytest.mark.parametrize("with_prefill", [True, False])
async def test_a_deadline_ends_an_attempt_whatever_holds_it_up(rig: Rig, with_prefill: bool) -> None:
    prefill, prefill_engine = await rig.prefill()
    decode, decode_engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    prefill_engine.pipeline.gate.clear()
    decode_engine.pipeline.gate.clear()
    targets = [target(prefill)] if with_prefill else []
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, *targets, budget_s=0.5)
    async with asyncio.timeout(15.0):
        failure = await orchestrator.failure(fence)
    assert failure.error.kind == "DeadlineExceeded"
    prefill_engine.pipeline.gate.set()
    decode_engine.pipeline.gate.set()
    await at_rest(prefill, decode)
