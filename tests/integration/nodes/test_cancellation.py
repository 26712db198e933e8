"""Whoever asked goes away, or time runs out, in each phase: everything returns to rest, on both sides."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from decode_nodes.node import DecodeNode
from pronghorn.ids import Fence
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Orchestrator, Rig, at_rest, holds, lets_go, prompt, target

TOKENS = prompt(5)
NEW_TOKENS = 200


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


@pytest.mark.conformance(45, 70)
@goings
async def test_while_it_is_decoded(rig: Rig, go: Going) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode(model_path="canary:?step_s=0.01")
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 60, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.tokens(fence)) >= 3)
    await go(orchestrator, fence)
    await at_rest(prefill, decode)
    assert ended_early(decode) == 1 and engine.pipeline.computed_tokens < 60
    said = orchestrator.tokens(fence)
    assert said == continuation(TOKENS, 60)[: len(said)] and len(said) < 60


async def test_one_orchestrator_that_dies_leaves_the_others_alone(rig: Rig) -> None:
    decode, _ = await rig.decode()
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
    async with asyncio.timeout(3.0):
        failure = await orchestrator.failure(fence)
    assert failure.error.kind == "DeadlineExceeded"
    prefill_engine.pipeline.gate.set()
    decode_engine.pipeline.gate.set()
    await at_rest(prefill, decode)
