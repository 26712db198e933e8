"""The hand-over between real nodes: what is pulled, what is said, in which order."""

import pytest

from pipelines.types.status import GenerationStatus
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import BLOCK_TOKENS, Rig, at_rest, prompt, target


@pytest.mark.conformance(43, 45)
async def test_a_prompt_is_prefilled_there_and_decoded_here(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, decode_engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(5)
    fence = await orchestrator.submit(tokens, 7, target(prefill))
    assert await orchestrator.result(fence) == continuation(tokens, 7)
    assert orchestrator.deltas[fence][-1].status is GenerationStatus.MAXIMUM_LENGTH
    assert decode_engine.pipeline.computed_tokens == 6, "decode computes what follows the first token, not the prompt"
    assert prefill.counters.value("blocks_sent") == decode.counters.value("blocks_received") == 6
    await at_rest(prefill, decode)


@pytest.mark.field("vllm#44607")
@pytest.mark.field("vllm#48633")
@pytest.mark.conformance(43)
@pytest.mark.parametrize("cached_blocks", range(4))
@pytest.mark.parametrize("more_tokens", [0, 1, BLOCK_TOKENS - 1])
async def test_only_blocks_that_decode_lacks_are_sent(rig: Rig, cached_blocks: int, more_tokens: int) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(4, more_tokens)
    if cached_blocks:
        warm = await orchestrator.submit(tokens[: cached_blocks * BLOCK_TOKENS + 1], 1)
        await orchestrator.result(warm)
    fence = await orchestrator.submit(tokens, 6, target(prefill))
    assert await orchestrator.result(fence) == continuation(tokens, 6)
    assert prefill.counters.value("blocks_sent") == -(-len(tokens) // BLOCK_TOKENS) - cached_blocks
    assert orchestrator.deltas[fence][0].num_cached_tokens == cached_blocks * BLOCK_TOKENS
    await at_rest(prefill, decode)


async def test_a_request_of_one_token_ends_with_the_hand_over(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, decode_engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(2)
    fence = await orchestrator.submit(tokens, 1, target(prefill))
    assert await orchestrator.result(fence) == continuation(tokens, 1)
    assert decode_engine.pipeline.computed_tokens == 0
    await at_rest(prefill, decode)


async def test_without_a_prefill_node_decode_computes_the_prompt(rig: Rig) -> None:
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(3)
    fence = await orchestrator.submit(tokens, 5)
    assert await orchestrator.result(fence) == continuation(tokens, 5)
    await at_rest(decode)


async def test_many_at_once_share_frames_and_none_gets_anothers_tokens(rig: Rig) -> None:
    prefill, _ = await rig.prefill(num_blocks=128)
    decode, decode_engine = await rig.decode(num_blocks=128)
    orchestrator = await rig.orchestrator(decode)
    prompts = [prompt(1 + i % 4, 1 + i % 3, start=100 * i) for i in range(12)]
    fences = [await orchestrator.submit(tokens, 8, target(prefill)) for tokens in prompts]
    for tokens, fence in zip(prompts, fences, strict=True):
        assert await orchestrator.result(fence) == continuation(tokens, 8)
    assert len(orchestrator.frames) < 12 * 8, "a frame carries the tokens of a step, not of a sequence"
    await at_rest(prefill, decode)


@pytest.mark.conformance(47)
async def test_the_first_token_does_not_wait_for_the_adoption(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, decode_engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    decode_engine.pipeline.gate.clear()
    tokens = prompt(3)
    fence = await orchestrator.submit(tokens, 4, target(prefill))
    await orchestrator.until(lambda: orchestrator.tokens(fence) == continuation(tokens, 1))
    decode_engine.pipeline.gate.set()
    assert await orchestrator.result(fence) == continuation(tokens, 4)
