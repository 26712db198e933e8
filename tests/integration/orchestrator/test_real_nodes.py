"""The orchestrator's core against real nodes with canary engines: whole requests, and what is left after them."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decode_nodes.node import DecodeNode
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pronghorn.deadline import Deadline
from pronghorn.errors import EndpointNotFound, NodeLost
from tests.fakes.canary_engine import canary_context
from tests.fakes.canary_pipeline import continuation
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL, Node, Rig, at_rest, holds, new_rig, orchestrator_identity, prompt

NEW_TOKENS = 6


@asynccontextmanager
async def cluster(
    decode_nodes: int = 1,
    prefill_nodes: int = 1,
    max_in_flight: int = 256,
    hand_over_stall_s: float = 30.0,
    **engine: Any,
) -> AsyncIterator[tuple[Rig, Replica, list[DecodeNode]]]:
    async with new_rig() as rig:
        prefill = [(await rig.prefill(f"prefill-{i}", **engine))[0] for i in range(prefill_nodes)]
        decode = [
            (await rig.decode(f"decode-{i}", stall_timeout_s=hand_over_stall_s, **engine))[0]
            for i in range(decode_nodes)
        ]
        nodes: list[Node] = [*prefill, *decode]
        for node in nodes:
            await node.shell.check_health()  # a node registers with its first healthy check
        replica = Replica(
            config(model_name=MODEL, max_in_flight=max_in_flight, starts_per_node=max_in_flight),
            rig.registry,
            GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=1024),
            rig.clock,
        )
        replica.start()
        try:
            await until_usable(replica, decode_nodes + prefill_nodes)
            yield rig, replica, decode
            await at_rest(*nodes)
        finally:
            await replica.stop()
            assert replica.failure() is None
            assert replica.in_flight() == 0
            replica.dispatcher.check()


async def until_usable(replica: Replica, count: int) -> None:
    async with asyncio.timeout(60.0):
        while sum(node.unusable is None for node in replica.views()) != count:  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.01)


def job(rig: Rig, tokens: list[int], target_endpoint: str | None = None) -> GenerationJob:
    context = canary_context(tokens, NEW_TOKENS)
    return GenerationJob(context, Deadline.after(rig.clock.now_s(), 30.0), MODEL, target_endpoint)


async def answer(replica: Replica, request: GenerationJob) -> list[int]:
    async with replica.generate(request) as outputs:
        return [token async for output in outputs for token in output.tokens]


@pytest.mark.parametrize("prefill_nodes", [0, 1])
async def test_a_prompt_is_answered_with_and_without_a_prefill_pool(prefill_nodes: int) -> None:
    async with cluster(prefill_nodes=prefill_nodes) as (rig, replica, _):
        tokens = prompt(5)
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)


async def test_a_named_endpoint_is_obeyed_and_an_unknown_one_is_refused() -> None:
    async with cluster(prefill_nodes=2) as (rig, replica, decode):
        tokens = prompt(3)
        request = job(rig, tokens, target_endpoint="prefill-1")
        assert await answer(replica, request) == continuation(tokens, NEW_TOKENS)
        with pytest.raises(EndpointNotFound):
            await answer(replica, job(rig, tokens, target_endpoint=decode[0].shell.name))


async def test_a_crowd_with_leavers_is_answered_exactly_and_leaves_nothing() -> None:
    chance = random.Random(7)
    async with cluster(decode_nodes=2, prefill_nodes=2) as (rig, replica, _):

        async def one(number: int, leaves: bool) -> None:
            tokens = prompt(1 + number % 4, start=number)
            expected = continuation(tokens, NEW_TOKENS)
            got: list[int] = []
            async with replica.generate(job(rig, tokens)) as outputs:
                async for output in outputs:
                    got += output.tokens
                    if leaves:
                        break
            assert got == expected[: len(got)] if leaves else got == expected

        async with asyncio.TaskGroup() as tasks:
            for number in range(40):
                tasks.create_task(one(number, leaves=chance.random() < 0.25))
        assert replica.in_flight() == 0


async def test_a_decode_node_that_stops_is_a_typed_error_or_another_node_and_the_rest_goes_on() -> None:
    async with cluster(decode_nodes=2) as (rig, replica, decode):
        tokens = prompt(4)

        async def one() -> str:
            try:
                got = await answer(replica, job(rig, tokens))
            except NodeLost:
                return "lost"
            assert got == continuation(tokens, NEW_TOKENS)
            return "answered"

        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(one()) for _ in range(20)]
            tasks.create_task(decode[0].shell.stop())
        assert {request.result() for request in requests} <= {"lost", "answered"}
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)


@pytest.mark.cells("F3 P10")
@pytest.mark.field("dynamo#13559")
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_nobody_hears_of_a_node_that_an_operator_drains(role: str) -> None:
    async with cluster(decode_nodes=2, prefill_nodes=2) as (rig, replica, decode):
        tokens = prompt(4)
        leaving: Node = decode[0] if role == "decode" else rig.prefill_nodes[0]
        gone = asyncio.Event()
        leaving.shell.when_dismissed = gone.set

        async def crowd() -> None:
            while not gone.is_set():
                assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)

        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(crowd())
            tasks.create_task(dismiss_amid(leaving))
        assert leaving.counters.value("handed_back") == 0
        await until_usable(replica, 3)
        assert await answer(replica, job(rig, tokens)) == continuation(tokens, NEW_TOKENS)


@pytest.mark.field("dynamo#13559")
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_what_a_node_hands_back_when_its_time_is_up_goes_on_elsewhere(role: str) -> None:
    async with cluster(decode_nodes=2, prefill_nodes=2) as (rig, replica, decode):
        tokens = prompt(4)
        leaving: Node = decode[0] if role == "decode" else rig.prefill_nodes[0]
        pipeline = rig.engines[leaving.shell.name].pipeline
        gone = asyncio.Event()
        leaving.shell.when_dismissed = gone.set
        pipeline.gate.clear()  # what it has does not end by itself
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(replica, job(rig, tokens))) for _ in range(8)]
            await holds(leaving)
            leaving.shell.dismiss(0.1)
            for got in answers:
                assert await got == continuation(tokens, NEW_TOKENS)
            pipeline.gate.set()
            await gone.wait()
        assert leaving.counters.value("handed_back") > 0
        assert replica.counters().get("request_failed.poison", 0) == 0
        await until_usable(replica, 3)


async def dismiss_amid(leaving: Node) -> None:
    """Once it is at work."""
    while leaving.in_flight == 0:  # noqa: ASYNC110  # asked from outside, which no event reaches
        await asyncio.sleep(0.001)
    leaving.shell.dismiss(10.0)
