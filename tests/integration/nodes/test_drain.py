"""A node that an operator asks to leave: what it still does, what it hands back, and who hears of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from cluster import drain as operator
from cluster.announce import Announcement
from kvcache.registry import NodeRecord
from pipelines.node.shell import NodeState
from pronghorn.errors import ConfigurationError
from pronghorn.wire import DRAIN_METHOD
from protos.node_pb2 import DrainRequest
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import PATIENCE_S, Frames, Node, Rig, at_rest, holds, lets_go, prompt, target

TOKENS = prompt(4)
Ask = Callable[..., Awaitable[None]]


async def ask(rig: Rig, node: Node, grace_s: float | None = None, incarnation: str | None = None) -> None:
    channel = await rig._channel(node.shell.address)
    request = DrainRequest(incarnation=incarnation or node.shell.incarnation, grace_s=grace_s)
    await channel.unary_unary(DRAIN_METHOD)(request.SerializeToString())


async def stopped(node: Node) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while node.shell.state is not NodeState.STOPPED:  # noqa: ASYNC110  # asked from outside
            await asyncio.sleep(0.01)


async def test_running_streams_finish_new_ones_are_refused_and_then_the_process_goes(rig: Rig) -> None:
    decode, engine = await rig.decode()
    engine.hold_after(3)
    gone = asyncio.Event()
    decode.shell.when_dismissed = gone.set
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 40)
    await orchestrator.until(lambda: bool(orchestrator.tokens(fence)))
    await ask(rig, decode, grace_s=PATIENCE_S)
    await orchestrator.until(lambda: orchestrator.beats[-1].draining)
    assert orchestrator.beats[-1].healthy
    await decode.shell.check_health()  # Serve must not take it away before it is through
    late = await orchestrator.submit(TOKENS, 4)
    refusal = (await orchestrator.failure(late)).error
    assert (refusal.kind, refusal.code) == ("NodeRefused", "draining")
    engine.open_gates()
    assert await orchestrator.result(fence) == continuation(TOKENS, 40)
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()
    assert decode.shell.state is NodeState.STOPPED


async def test_what_runs_still_when_the_grace_is_over_is_handed_back_to_be_gone_on_with(rig: Rig) -> None:
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, 4)
    await holds(decode)
    await ask(rig, decode, grace_s=0.1)
    failure = (await orchestrator.failure(fence)).error
    engine.pipeline.gate.set()
    assert (failure.kind, failure.code) == ("NodeRefused", "draining")
    assert decode.counters.value("handed_back") == 1


@pytest.mark.field("dynamo#13559")
async def test_a_hand_over_in_progress_completes_and_so_does_one_that_comes_meanwhile(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    first = await orchestrator.submit(TOKENS, 6, target(prefill))
    await holds(prefill)
    await ask(rig, prefill, grace_s=PATIENCE_S)
    second = await orchestrator.submit(prompt(3, start=50), 6, target(prefill))
    await holds(prefill, 2)
    engine.pipeline.gate.set()
    assert await orchestrator.result(first) == continuation(TOKENS, 6)
    assert await orchestrator.result(second) == continuation(prompt(3, start=50), 6)
    assert decode.counters.value("pull_committed") == 2
    await stopped(prefill)
    await at_rest(decode)


async def test_a_reader_that_stands_still_is_let_go_of_when_the_grace_is_over(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    held = asyncio.Event()

    def stuck(frames: Frames) -> Frames:
        async def read(data: bytes) -> AsyncIterator[bytes]:
            stream = frames(data)
            try:
                yield await anext(stream)
                held.set()
                await asyncio.Event().wait()
            finally:
                await stream.aclose()

        return read

    front = await rig.in_front_of(prefill, stuck)
    decode, _ = await rig.decode(stall_timeout_s=60.0)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 6, front.target)
    async with asyncio.timeout(PATIENCE_S):
        await held.wait()
    await ask(rig, prefill, grace_s=0.2)
    await stopped(prefill)
    await front.die()
    assert await orchestrator.result(fence) == continuation(TOKENS, 6), "the decode node computes the prompt"
    await lets_go(prefill)
    await at_rest(decode)


async def test_serve_that_asks_in_the_middle_waits_for_the_same_drain_and_may_shorten_it(rig: Rig) -> None:
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, 4)
    await holds(decode)
    await ask(rig, decode, grace_s=600.0)
    async with asyncio.TaskGroup() as tasks:
        serve = tasks.create_task(decode.drain(0.1))
        assert (await orchestrator.failure(fence)).error.code == "draining"
        assert not serve.done()
        engine.pipeline.gate.set()
    assert decode.shell.state is NodeState.STOPPED


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan")])
async def test_a_grace_that_is_no_time_is_refused(rig: Rig, grace_s: float) -> None:
    decode, _ = await rig.decode()
    with pytest.raises(AioRpcError) as refused:
        await ask(rig, decode, grace_s)
    assert refused.value.code() is StatusCode.INVALID_ARGUMENT and "grace_s" in str(refused.value.details())
    assert decode.shell.state is NodeState.SERVING


async def test_another_life_is_not_drained_in_its_predecessors_place(rig: Rig) -> None:
    decode, _ = await rig.decode()
    with pytest.raises(AioRpcError) as refused:
        await ask(rig, decode, incarnation="0" * 32)
    assert refused.value.code() is StatusCode.FAILED_PRECONDITION and "0" * 32 in str(refused.value.details())
    assert decode.shell.state is NodeState.SERVING


# --- the operator's side ----------------------------------------------------------------------------------------------


async def test_the_command_tells_what_is_held_and_returns_when_the_node_is_gone(rig: Rig) -> None:
    decode, engine = await rig.decode()
    engine.hold_after(3)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 60)
    await orchestrator.until(lambda: bool(orchestrator.tokens(fence)))
    said: list[Announcement] = []

    def hear(announcement: Announcement) -> None:
        said.append(announcement)
        if len(said) == 2:
            engine.open_gates()

    await operator.drain(decode.shell.record(), PATIENCE_S, 2 * PATIENCE_S, hear)
    assert await orchestrator.result(fence) == continuation(TOKENS, 60)
    assert said[0].text == "draining decode-1"
    assert said[1].text.startswith("1 in flight, ")
    assert decode.in_flight == 0


async def test_the_command_says_what_is_held_still_when_its_time_is_up(rig: Rig) -> None:
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    await orchestrator.submit(TOKENS, 4)
    await holds(decode)
    with pytest.raises(ConfigurationError, match="decode-1 is there still after 0 s, with 1 in flight"):
        await operator.drain(decode.shell.record(), PATIENCE_S, 0.3, lambda _: None)


async def test_the_command_says_where_nobody_answers(rig: Rig) -> None:
    decode, _ = await rig.decode()
    record: NodeRecord = decode.shell.record()
    await decode.shell.stop()
    with pytest.raises(ConfigurationError, match=f"decode-1 at {record.address} was not drained: UNAVAILABLE"):
        await operator.drain(record, None, 1.0, lambda _: None)
