"""Many clients leave at once, over real gRPC: all slots and blocks are free again, and the next requests succeed."""

import asyncio
import random
import time
from typing import Any

import pytest

from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Rig, at_rest, prompt
from tests.integration.orchestrator.test_real_nodes import NEW_TOKENS, answer, cluster, job

IN_FLIGHT = 500
NEXT = 100
ROOM: dict[str, Any] = {
    "num_blocks": 4096,
    "max_waiting": 1024,
    "max_batch_size": 32,
    "max_batch_input_tokens": 512,
    # All of it is one process here: on a busy machine a crowd of hand-overs is silent for long.
    "hand_over_stall_s": 60.0,
}


async def rate(rig: Rig, replica: Replica, requests: int, start: int) -> float:
    """Requests a second; every one of them gets its exact answer."""
    began_s = time.perf_counter()
    prompts = [prompt(2, start=start + i) for i in range(requests)]
    answers = await asyncio.gather(*(answer(replica, job(rig, tokens)) for tokens in prompts))
    assert answers == [continuation(tokens, NEW_TOKENS) for tokens in prompts]
    return requests / (time.perf_counter() - began_s)


@pytest.mark.field("sglang#28651")
async def test_when_nine_of_ten_prefills_are_cancelled_at_once_the_next_requests_succeed() -> None:
    async with cluster(decode_nodes=2, prefill_nodes=2, max_in_flight=1000, **ROOM) as (rig, replica, decode):
        before = await rate(rig, replica, NEXT, start=0)
        tokens = [prompt(3, start=300 + i) for i in range(IN_FLIGHT)]
        prefill = [rig.engines["prefill-0"], rig.engines["prefill-1"]]
        for engine in prefill:
            engine.close_gates()  # or a fast machine has ended them before so many are there
        requests = [asyncio.ensure_future(answer(replica, job(rig, each))) for each in tokens]
        async with asyncio.timeout(60.0):
            while sum(node.in_flight for node in decode) < IN_FLIGHT // 2:  # noqa: ASYNC110  (nobody announces it)
                await asyncio.sleep(0.001)  # a loop that never rests would keep the engines' threads from their work
        staying = requests[::10]
        for request in requests:
            if request not in staying:
                request.cancel()
        for engine in prefill:
            engine.open_gates()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert [ended[i] for i in range(0, IN_FLIGHT, 10)] == [continuation(each, NEW_TOKENS) for each in tokens[::10]]
        cancelled = sum(isinstance(end, asyncio.CancelledError) for end in ended)
        assert cancelled > IN_FLIGHT // 2
        await at_rest(*decode)
        assert replica.in_flight() == 0
        after = await rate(rig, replica, NEXT, start=0)
        print(f"{cancelled} cancelled; {before:.0f} requests/s before, {after:.0f} after")  # noqa: T201


@pytest.mark.field("ray#52533", "vllm#46289")
async def test_a_thousand_requests_that_are_cancelled_at_random_moments_leave_nothing() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201  # shown where the test fails
    chance = random.Random(seed)
    async with cluster(decode_nodes=2, prefill_nodes=2, max_in_flight=1000, **ROOM) as (rig, replica, decode):

        async def start_and_cancel(number: int, after_s: float) -> str:
            request: GenerationJob = job(rig, prompt(1 + number % 6, start=number))
            task = asyncio.ensure_future(answer(replica, request))
            await asyncio.sleep(after_s)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return "cancelled"
            assert task.result() == continuation(request.context.tokens[:].tolist(), NEW_TOKENS)
            return "answered"

        ends: list[str] = []
        for first in range(0, 1000, 50):
            batch = [start_and_cancel(first + i, chance.uniform(0.0, 0.05)) for i in range(50)]
            ends += await asyncio.gather(*batch)
        async with asyncio.timeout(2.0):
            while replica.in_flight():  # noqa: ASYNC110  (nobody announces it)
                await asyncio.sleep(0.001)
        replica.dispatcher.check()
        await at_rest(*decode)
        assert ends.count("cancelled") > 300


@pytest.mark.field("TensorRT-LLM#5820")
async def test_a_cluster_that_was_loaded_and_cancelled_again_and_again_answers_a_probe() -> None:
    async with cluster(decode_nodes=1, prefill_nodes=1, max_in_flight=1000, **ROOM) as (rig, replica, decode):
        for round_ in range(5):
            requests = [asyncio.ensure_future(answer(replica, job(rig, prompt(4, start=60 * i)))) for i in range(60)]
            await asyncio.sleep(0.01 * round_)
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
            assert replica.ready()[0]
            assert await answer(replica, job(rig, prompt(2))) == continuation(prompt(2), NEW_TOKENS)
            await at_rest(*decode)
