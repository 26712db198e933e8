"""Whoever asked goes away after any number of turns of the loop: nothing is left on any of the three sides."""

import asyncio
import gc

import pytest

from orchestrator.api.app import build_app
from orchestrator.api.served_models import ServedModels
from tests.fakes.api_client import Connection, settings
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation
from tests.integration.nodes.rig import MODEL, at_rest, prompt
from tests.integration.orchestrator.test_real_nodes import NEW_TOKENS, answer, cluster, job

TURNS = range(0, 300, 4)
"""The last of them come after the end."""


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def tasks() -> int:
    gc.collect()
    await asyncio.sleep(0.05)  # generators that were dropped are closed by the loop
    return len(asyncio.all_tasks())


@pytest.mark.field("dynamo#7489")
async def test_a_request_that_is_cancelled_after_any_number_of_turns_leaves_nothing() -> None:
    async with cluster() as (rig, replica, decode):
        before = await tasks()
        whole = 0
        for count in TURNS:
            tokens = prompt(5, start=count)
            request = asyncio.ensure_future(answer(replica, job(rig, tokens)))
            await turns(count)
            request.cancel()
            async with asyncio.timeout(60.0):
                await asyncio.wait([request])
            if not request.cancelled():
                whole += 1
                assert request.result() == continuation(tokens, NEW_TOKENS)
            assert replica.in_flight() == 0
            replica.dispatcher.check()
        assert whole < len(TURNS)
        await at_rest(*decode)
        assert await tasks() == before


@pytest.mark.field("dynamo#7489")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_after_any_number_of_turns_leaves_nothing(stream: bool) -> None:
    async with cluster() as (_, replica, decode):
        tokenizer = byte_tokenizer()
        tokenizer.vocab_size = VOCAB_SIZE
        app = build_app(replica, replica, ServedModels([(tokenizer, settings(model_name=MODEL))]))
        before = await tasks()
        for count in TURNS:
            prompts = [f"the first of {count}", f"the second of {count}"]
            body = {"prompt": prompts, "max_tokens": NEW_TOKENS, "stream": stream}
            connection = Connection(app, "/v1/completions", body)
            await turns(count)
            connection.disconnect()
            async with asyncio.timeout(60.0):
                await connection.call
            assert replica.in_flight() == 0
            replica.dispatcher.check()
        await at_rest(*decode)
        assert await tasks() == before
