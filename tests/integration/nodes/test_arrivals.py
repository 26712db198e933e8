"""What comes a second time, or could break an engine, is refused by name; nobody else notices."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from grpc import aio

from kvcache import transfer
from pipelines.node.prefill_request import PrefillRequest
from pipelines.types import wire
from pipelines.types.frames import Submit
from pipelines.types.handover import HandOverMessage, Refusal
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import Fence, Incarnation
from pronghorn.wire import CLIENT_CHANNEL_OPTIONS, PREFILL_METHOD
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import BLOCK_TOKENS, Node, Rig, at_rest, prompt, target

TOKENS = prompt(2)


def submit(node: Node, context: TextContext, budget_s: float = 5.0) -> Submit:
    return Submit(Fence(context.request_id, 1, node.shell.incarnation), context, budget_s)


async def first_words(node: Node, request: PrefillRequest) -> list[object]:
    """What the prefill node says on a hand-over beside the blocks."""
    said: list[object] = []
    async with aio.insecure_channel(node.shell.address, options=CLIENT_CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream(PREFILL_METHOD)(request.to_bytes(), timeout=5.0)
        while isinstance(data := await call.read(), bytes):
            if isinstance(frame := transfer.decode(data), transfer.MessageFrame):
                said.append(wire.decode(frame.payload, HandOverMessage))
    return said


def hand_over(asker: Node, prefill: Node, context: TextContext, budget_s: float = 5.0) -> PrefillRequest:
    fence = Fence(context.request_id, 1, Incarnation(asker.shell.incarnation))
    return PrefillRequest(asker.shell.identity, fence, prefill.shell.incarnation, context, [0], budget_s)


@pytest.mark.parametrize("with_prefill", [True, False])
async def test_an_attempt_that_has_ended_is_not_begun_again(rig: Rig, with_prefill: bool) -> None:
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    context = canary_context(TOKENS, 4)
    fence = Fence(context.request_id, 1, decode.shell.incarnation)
    frame = Submit(fence, context, 5.0, [target(prefill)] if with_prefill else [])
    await orchestrator.send(frame)
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    computed = engine.pipeline.computed_tokens
    await orchestrator.send(frame)
    await orchestrator.until(lambda: fence in orchestrator.failures)
    assert orchestrator.failures[fence].error.code == "repeated"
    assert engine.pipeline.computed_tokens == computed
    await at_rest(prefill, decode)


async def test_a_hand_over_that_has_ended_is_not_begun_again(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    request = hand_over(decode, prefill, canary_context(TOKENS, 4))
    assert not any(isinstance(word, Refusal) for word in await first_words(prefill, request))
    (refusal,) = await first_words(prefill, request)
    assert isinstance(refusal, Refusal) and refusal.error.code == "repeated"
    await at_rest(prefill)


def no_token(context: TextContext) -> None:
    context.tokens = TokenBuffer(np.array([*TOKENS, -5]))


def above_the_vocabulary(context: TextContext) -> None:
    context.tokens = TokenBuffer(np.array([*TOKENS, 2**40]))


def too_long(context: TextContext) -> None:
    context.max_length = 10**9


def over(context: TextContext) -> None:
    context.status = GenerationStatus.MAXIMUM_LENGTH


def moved(context: TextContext) -> None:
    context.tokens.skip_processing(1)


def cut(context: TextContext) -> None:
    context.tokens.chunk(BLOCK_TOKENS // 2)


Spoil = Callable[[TextContext], None]


@pytest.mark.parametrize("spoil", [no_token, above_the_vocabulary, too_long, over, moved, cut])
async def test_a_request_that_would_break_a_decode_engine_is_refused(rig: Rig, spoil: Spoil) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    assert await orchestrator.result(await orchestrator.submit(TOKENS, 4)) == continuation(TOKENS, 4)
    frame = submit(decode, canary_context(TOKENS, 4))
    spoil(frame.context)
    await orchestrator.send(frame)
    assert (await orchestrator.failure(frame.fence)).error.kind == "InvalidRequest"
    assert decode.shell.unhealthy_reason() is None
    await at_rest(decode)


@pytest.mark.parametrize("spoil", [no_token, above_the_vocabulary, too_long, over])
async def test_a_prompt_that_would_break_a_prefill_engine_is_refused(rig: Rig, spoil: Spoil) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    request = hand_over(decode, prefill, canary_context(TOKENS, 4))
    spoil(request.context)
    (refusal,) = await first_words(prefill, request)
    assert isinstance(refusal, Refusal) and refusal.error.kind == "InvalidRequest"
    assert prefill.shell.unhealthy_reason() is None
    await at_rest(prefill)


async def test_a_budget_that_never_ends_is_refused(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    frame = submit(decode, canary_context(TOKENS, 4), budget_s=float("nan"))
    await orchestrator.send(frame)
    assert "budget_s" in (await orchestrator.failure(frame.fence)).error.message
    (refusal,) = await first_words(prefill, hand_over(decode, prefill, canary_context(TOKENS, 4), float("inf")))
    assert isinstance(refusal, Refusal) and "budget_s" in refusal.error.message


async def test_names_that_an_asker_makes_up_are_no_names_of_counters(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    for number in range(3):
        asker = msgspec.structs.replace(
            decode.shell.identity, layout=decode.shell.identity.layout | {f"made_up_{number}": "x"}
        )
        request = msgspec.structs.replace(hand_over(decode, prefill, canary_context(TOKENS, 4)), asker=asker)
        (refusal,) = await first_words(prefill, request)
        assert isinstance(refusal, Refusal) and f"layout.made_up_{number}" in refusal.error.message
    assert prefill.counters.snapshot() == {"hand_over_refused.layout": 3}
