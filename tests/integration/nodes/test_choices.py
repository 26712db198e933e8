"""Requests for several choices between real nodes: one hand-over, several sequences."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from kvcache import transfer
from pipelines.types import wire
from pipelines.types.frames import PrefillTarget, Submit
from pipelines.types.handover import FirstToken
from pipelines.types.status import GenerationStatus
from prefill_nodes.node import PrefillNode
from pronghorn.ids import Fence, Incarnation
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation
from tests.integration.nodes.rig import Frames, Orchestrator, Rig, at_rest, lets_go, prompt, target

TOKENS = prompt(5, 2)
FIRST = continuation(TOKENS, 1)[0]


def expected(choice: int, new_tokens: int) -> list[int]:
    first = (FIRST + choice) % VOCAB_SIZE
    return [first, *continuation([*TOKENS, first], new_tokens - 1)]


async def submit(
    orchestrator: Orchestrator, choices: int, new_tokens: int, *prefill: PrefillTarget, eos: Sequence[int] = ()
) -> Fence:
    context = canary_context(TOKENS, new_tokens, eos=eos)
    context.num_choices = choices
    fence = Fence(context.request_id, 1, Incarnation(orchestrator.node.incarnation))
    await orchestrator.send(Submit(fence, context, 30.0, list(prefill)))
    return fence


def said(orchestrator: Orchestrator, fence: Fence, choice: int) -> list[int]:
    return [t for delta in orchestrator.deltas[fence] if delta.choice == choice for t in delta.tokens]


@pytest.mark.parametrize("apart", [True, False])
async def test_every_choice_comes_from_one_prefill(rig: Rig, apart: bool) -> None:
    prefill, prefill_engine = await rig.prefill()
    decode, decode_engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = await submit(orchestrator, 3, 7, *([target(prefill)] if apart else []))
    await orchestrator.result(fence)
    for choice in range(3):
        assert said(orchestrator, fence, choice) == expected(choice, 7)
    here, there = decode_engine.pipeline.computed_tokens, prefill_engine.pipeline.computed_tokens
    assert (here, there) == ((18, len(TOKENS)) if apart else (18 + len(TOKENS), 0))
    ends = [delta.choice_status for delta in orchestrator.deltas[fence] if delta.choice_status is not None]
    assert ends == [GenerationStatus.MAXIMUM_LENGTH] * 2, "the third end is the attempt's own"
    await at_rest(prefill, decode)


async def test_a_choice_that_ends_with_its_first_token_leaves_the_others_alone(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = await submit(orchestrator, 3, 7, target(prefill), eos=[FIRST])
    await orchestrator.result(fence)
    assert [said(orchestrator, fence, choice) for choice in range(3)] == [[FIRST], expected(1, 7), expected(2, 7)]
    await at_rest(prefill, decode)


async def test_an_abort_frees_every_choice(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    engine.hold_after(4)
    orchestrator = await rig.orchestrator(decode)
    fence = await submit(orchestrator, 4, 40, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.deltas.get(fence, [])) > 8)
    await orchestrator.abort(fence)
    engine.open_gates()
    await lets_go(decode)
    await at_rest(prefill, decode)


def without_siblings(frames: Frames) -> Frames:
    """A prefill node of an older version, which samples one token."""

    async def one_token(data: bytes) -> AsyncGenerator[bytes, None]:
        async for frame in frames(data):
            said = transfer.decode(frame)
            if isinstance(said, transfer.MessageFrame) and b"FirstToken" in bytes(said.payload):
                token = wire.decode(said.payload, FirstToken)
                frame = transfer.encode_message(wire.encode(FirstToken(token.token)))
            yield frame

    return one_token


async def test_a_prefill_node_that_knows_of_no_choices_is_passed_over(rig: Rig) -> None:
    prefill: PrefillNode
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    front = await rig.in_front_of(prefill, without_siblings)
    fence = await submit(orchestrator, 2, 5, front.target)
    await orchestrator.result(fence)
    assert [said(orchestrator, fence, choice) for choice in range(2)] == [expected(0, 5), expected(1, 5)]
    assert decode.counters.value("pull_failed", "incomplete") == 1
    await at_rest(prefill, decode)
