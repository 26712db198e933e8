"""Prefill nodes that die, lie, refuse or fall silent: the tokens are the same, said once, and nothing is left held."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from kvcache import transfer
from pipelines.types import wire
from pipelines.types.frames import PrefillTarget
from pipelines.types.handover import FirstToken, HandOverMessage, Welcome
from pronghorn.ids import Incarnation, NodeName, new_incarnation
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Frames, Orchestrator, Rig, at_rest, holds, prompt, target

TOKENS = prompt(5)
NEW_TOKENS = 6
EXPECTED = continuation(TOKENS, NEW_TOKENS)


async def answer(orchestrator: Orchestrator, *targets: PrefillTarget, **more: Any) -> list[int]:
    return await orchestrator.result(await orchestrator.submit(TOKENS, NEW_TOKENS, *targets, **more))


async def breaks() -> None:
    raise ConnectionError("the process is gone")


async def hangs() -> None:
    await asyncio.Event().wait()


def kind_of(frame: bytes) -> type:
    match transfer.decode(frame):
        case transfer.MessageFrame(payload=payload):
            return type(wire.decode(payload, HandOverMessage))
        case other:
            return type(other)


def before(kind: type, fault: Callable[[], Awaitable[None]]) -> Callable[[Frames], Frames]:
    """Lets a hand-over run up to its first frame of `kind`; then `fault` happens."""

    def tamper(honest: Frames) -> Frames:
        async def frames(request: bytes) -> AsyncGenerator[bytes, None]:
            async with aclosing(honest(request)) as stream:
                async for frame in stream:
                    if kind_of(frame) is kind:
                        await fault()
                    yield frame

        return frames

    return tamper


phases = pytest.mark.parametrize("kind", [Welcome, transfer.BlocksFrame, FirstToken, transfer.CommitFrame])


def flip_a_bit(honest: Frames) -> Frames:
    async def frames(request: bytes) -> AsyncGenerator[bytes, None]:
        flipped = False
        async with aclosing(honest(request)) as stream:
            async for frame in stream:
                if isinstance(transfer.decode(frame), transfer.BlocksFrame) and not flipped:
                    flipped = True
                    frame = frame[:-1] + bytes([frame[-1] ^ 1])
                yield frame

    return frames


async def test_nobody_answers_at_the_address(rig: Rig) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    nobody = PrefillTarget(NodeName("prefill-0"), "127.0.0.1:1", new_incarnation())
    assert await answer(orchestrator, nobody) == EXPECTED
    assert decode.counters.value("pull_failed", "not_begun") == 1
    await at_rest(decode)


@pytest.mark.field("vllm#50754")
@pytest.mark.conformance(45, 46)
@phases
async def test_a_prefill_node_that_dies_in_any_phase_costs_no_token(rig: Rig, kind: type) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    dying = await rig.in_front_of(prefill, before(kind, breaks))
    assert await answer(orchestrator, dying.target) == EXPECTED
    assert decode.counters.value("pull_failed", "not_begun" if kind is Welcome else "node_lost") == 1
    await at_rest(prefill, decode)


@pytest.mark.field("aibrix#2289")
@pytest.mark.conformance(46)
@phases
async def test_the_next_prefill_node_takes_over_from_one_that_died(rig: Rig, kind: type) -> None:
    first, _ = await rig.prefill("prefill-1")
    second, _ = await rig.prefill("prefill-2")
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    dying = await rig.in_front_of(first, before(kind, breaks))
    assert await answer(orchestrator, dying.target, target(second)) == EXPECTED
    assert second.counters.value("blocks_sent") == 6
    assert engine.pipeline.computed_tokens == NEW_TOKENS - 1, "decode did not compute the prompt"
    await at_rest(first, second, decode)


async def test_a_prefill_server_that_is_stopped_while_it_computes(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    front = await rig.in_front_of(prefill, lambda frames: frames)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, front.target)
    await holds(prefill)
    await front.die()
    engine.pipeline.gate.set()
    assert await orchestrator.result(fence) == EXPECTED
    await at_rest(prefill, decode)


@pytest.mark.cells("F9 P5")
@pytest.mark.conformance(42)
async def test_a_flipped_bit_is_refused_counted_and_recomputed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    liar = await rig.in_front_of(prefill, flip_a_bit)
    assert await answer(orchestrator, liar.target) == EXPECTED
    assert decode.counters.value("pull_failed", "wrong_digest") == 1
    assert engine.pipeline.computed_tokens >= len(TOKENS), "the prompt was computed here"
    assert "wrong_digest" in caplog.text and "prefill-1" in caplog.text
    await at_rest(prefill, decode)


@pytest.mark.field("sglang#36033")
@phases
async def test_a_prefill_node_that_falls_silent_is_left_within_the_bound(rig: Rig, kind: type) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(stall_timeout_s=0.2)
    orchestrator = await rig.orchestrator(decode)
    silent = await rig.in_front_of(prefill, before(kind, hangs))
    async with asyncio.timeout(15.0):
        assert await answer(orchestrator, silent.target) == EXPECTED
    assert decode.counters.value("pull_failed", "stalled") == 1
    await at_rest(prefill, decode)


async def test_a_prefill_engine_that_is_busy_is_waited_for(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode(stall_timeout_s=0.5)
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, target(prefill))
    await holds(prefill)
    beats = len(orchestrator.beats)
    await orchestrator.until(lambda: len(orchestrator.beats) >= beats + 3)
    assert decode.counters.value("pull_failed", "stalled") == 0
    engine.pipeline.gate.set()
    assert await orchestrator.result(fence) == EXPECTED
    assert decode.counters.value("pull_committed") == 1


@pytest.mark.field("llm-d-router#1206")
async def test_a_full_prefill_node_is_passed_over_for_the_next_one_and_then_for_decode_and_each_is_counted(
    rig: Rig,
) -> None:
    full, engine = await rig.prefill("prefill-1", max_in_flight=1)
    second, _ = await rig.prefill("prefill-2")
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    hog = await orchestrator.submit(prompt(2, start=500), 2, target(full))
    await holds(full)
    assert await answer(orchestrator, target(full), target(second)) == EXPECTED
    assert second.counters.value("hand_over_ended", "committed") == 1
    assert decode.counters.value("pull_failed", "rate_limit_exceeded") == 1
    assert await answer(orchestrator, target(full)) == EXPECTED
    assert decode.counters.value("pull_failed", "rate_limit_exceeded") == 2
    engine.pipeline.gate.set()
    assert await orchestrator.result(hog) == continuation(prompt(2, start=500), 2)
    await at_rest(full, second, decode)


@pytest.mark.field("aibrix#2289")
async def test_only_these_ends_in_one_typed_error(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    dying = await rig.in_front_of(prefill, before(FirstToken, breaks))
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, dying.target, only_these=True)
    failure = await orchestrator.failure(fence)
    assert failure.error.kind == "NoPrefill" and failure.error.code == "node_lost"
    await at_rest(prefill, decode)


async def test_another_life_of_the_prefill_node_refuses_by_name(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    stale = target(prefill, incarnation=Incarnation("0" * 32))
    fence = await orchestrator.submit(TOKENS, NEW_TOKENS, stale, only_these=True)
    failure = await orchestrator.failure(fence)
    assert failure.error.code == "handshake_refused" and "incarnation" in failure.error.message
    assert prefill.counters.value("hand_over_refused", "incarnation") == 1
    await at_rest(prefill, decode)


@pytest.mark.field("vllm#42895")
@pytest.mark.conformance(42)
async def test_another_layout_is_refused_by_name_and_computed_here(rig: Rig) -> None:
    prefill, _ = await rig.prefill(block_tokens=8)
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    assert await answer(orchestrator, target(prefill)) == EXPECTED
    assert prefill.counters.value("hand_over_refused", "layout.block_tokens") == 1
    assert decode.counters.value("pull_failed", "handshake_refused") == 1
    await at_rest(prefill, decode)


@pytest.mark.field("vllm#42895", "vllm#26744", "vllm#28925")
async def test_every_pair_of_block_sizes_and_replicas_hands_over_or_is_refused_by_name(rig: Rig) -> None:
    """vllm#42895: nodes of different block sizes and parallelism hung, or failed without a reason."""
    shapes = [(4, 1), (4, 2), (8, 1), (2, 2)]

    def told(block_tokens: int, replicas: int) -> dict[str, int]:
        return {"block_tokens": block_tokens, "data_parallel": replicas}

    prefill = {shape: (await rig.prefill(f"prefill-{i}", **told(*shape)))[0] for i, shape in enumerate(shapes)}
    for number, (block_tokens, replicas) in enumerate(shapes):
        decode, _ = await rig.decode(f"decode-{number}", **told(block_tokens, replicas))
        orchestrator = await rig.orchestrator(decode)
        for (theirs, _), node in prefill.items():
            refused = node.counters.value("hand_over_refused", "layout.block_tokens")
            committed = decode.counters.value("pull_committed")
            assert await answer(orchestrator, target(node)) == EXPECTED
            alike = theirs == block_tokens
            assert decode.counters.value("pull_committed") - committed == alike
            assert node.counters.value("hand_over_refused", "layout.block_tokens") - refused == (not alike)
            decode.shell.drop_prefix_cache()
        await at_rest(decode, *prefill.values())


async def test_another_seed_and_another_model_are_refused_by_name(rig: Rig) -> None:
    other_seed, _ = await rig.prefill("prefill-1", seed=bytes(32))
    other_model, _ = await rig.prefill("prefill-2", model_name="other")
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    assert await answer(orchestrator, target(other_seed), target(other_model)) == EXPECTED
    assert other_seed.counters.value("hand_over_refused", "seed_digest") == 1
    assert other_model.counters.value("hand_over_refused", "model") == 1
    await at_rest(other_seed, other_model, decode)
