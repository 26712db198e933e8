"""Nodes whose engines are processes: blocks land in memory that the engine reads, and a killed engine is noticed."""

import asyncio

import psutil

from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import BLOCK_TOKENS, Rig, at_rest, prompt, target

PREFILL, DECODE = "tests.fakes.canary_prefill", "tests.fakes.canary_decode"


async def test_blocks_that_are_pulled_are_read_by_the_engines_process(rig: Rig) -> None:
    prefill = await rig.prefill_over(rig.process(PREFILL))
    decode = await rig.decode_over(rig.process(DECODE))
    orchestrator = await rig.orchestrator(decode)
    tokens = prompt(20)
    for blocks in (5, 12, 20):
        part = tokens[: blocks * BLOCK_TOKENS + 1]
        fence = await orchestrator.submit(part, 6, target(prefill))
        assert await orchestrator.result(fence) == continuation(part, 6)
    assert decode.counters.value("pull_committed") == 3
    assert prefill.counters.value("blocks_sent") == 6 + (13 - 5) + (21 - 12)
    await at_rest(prefill, decode)


async def test_a_killed_engine_fails_its_attempts_at_once(rig: Rig) -> None:
    slow = "canary:?step_s=0.05"
    decode = await rig.decode_over(rig.process(DECODE, model_path=slow), model_path=slow)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(prompt(3), 200)
    await orchestrator.until(lambda: bool(orchestrator.tokens(fence)))
    [engine] = [child for child in psutil.Process().children() if DECODE in child.cmdline()]
    engine.kill()
    async with asyncio.timeout(15.0):
        failure = await orchestrator.failure(fence)
    assert failure.error.kind == "EngineDied" and "SIGKILL" in failure.error.message
    reason = decode.shell.unhealthy_reason()
    assert reason is not None and "SIGKILL" in reason
