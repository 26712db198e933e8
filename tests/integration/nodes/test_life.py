"""How a node comes, says that it is well, leaves, and what it does when its engine dies."""

import asyncio

import pytest

from pronghorn.errors import ConfigurationError, Unavailable
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import PATIENCE_S, Node, Rig, at_rest, holds, prompt, target

TOKENS = prompt(4)


async def registered(rig: Rig, *nodes: Node) -> None:
    names = {node.shell.name for node in nodes}
    async with asyncio.timeout(60.0):
        async for _ in rig.registry.changes():
            if {record.name for record in await rig.registry.list()} == names:
                return


@pytest.mark.field("production-stack#619", "dynamo#5038")
async def test_a_node_is_registered_by_its_first_healthy_check_and_stays_so(rig: Rig) -> None:
    decode, _ = await rig.decode()
    assert await rig.registry.list() == []
    await decode.shell.check_health()
    await registered(rig, decode)
    [record] = await rig.registry.list()
    assert (record.role, record.address) == ("decode", decode.shell.address)
    assert record.incarnation == decode.shell.incarnation and record.layout == decode.shell.identity.layout
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.until(lambda: len(orchestrator.beats) >= 4)  # longer than a lease
    assert len(await rig.registry.list()) == 1


async def test_a_draining_decode_node_finishes_what_it_has_and_refuses_more(rig: Rig) -> None:
    decode, engine = await rig.decode()
    engine.hold_after(3)
    await decode.shell.check_health()
    await registered(rig, decode)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 40)
    await orchestrator.until(lambda: bool(orchestrator.tokens(fence)))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(decode.drain(PATIENCE_S))
        await orchestrator.until(lambda: orchestrator.beats[-1].draining)
        assert await rig.registry.list() == []
        late = await orchestrator.submit(TOKENS, 4)
        failure = await orchestrator.failure(late)
        assert (failure.error.kind, failure.error.code) == ("NodeRefused", "draining")
        engine.open_gates()
        assert await orchestrator.result(fence) == continuation(TOKENS, 40)
    assert decode.in_flight == 0
    with pytest.raises(Unavailable, match="stopped"):
        await decode.shell.check_health()


async def test_a_drain_that_takes_too_long_ends_in_typed_errors(rig: Rig) -> None:
    decode, engine = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(TOKENS, 4)
    await holds(decode)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(decode.drain(0.1))
        failure = await orchestrator.failure(fence)
        engine.pipeline.gate.set()
    assert failure.error.kind == "NodeRefused"


async def test_a_draining_prefill_node_lingers_for_hand_overs_that_are_on_their_way(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    first = await orchestrator.submit(TOKENS, 6, target(prefill))
    await holds(prefill)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prefill.drain(10.0))
        second = await orchestrator.submit(prompt(3, start=50), 6, target(prefill))
        await orchestrator.until(lambda: orchestrator.beats[-1].awaiting_blocks == 2)
        engine.pipeline.gate.set()
        assert await orchestrator.result(first) == continuation(TOKENS, 6)
        assert await orchestrator.result(second) == continuation(prompt(3, start=50), 6)
    assert decode.counters.value("pull_committed") == 2
    await at_rest(decode)


async def test_the_death_of_a_decode_engine_fails_everything_at_once_and_leaves_the_registry(rig: Rig) -> None:
    prefill, prefill_engine = await rig.prefill()
    decode, engine = await rig.decode()
    await decode.shell.check_health()
    await registered(rig, decode)
    orchestrator = await rig.orchestrator(decode)
    prefill_engine.pipeline.gate.clear()
    pulling = await orchestrator.submit(TOKENS, 4, target(prefill))
    await holds(prefill)
    engine.pipeline.break_with = RuntimeError("the device is lost")
    running = await orchestrator.submit(TOKENS, 40)
    for fence in (pulling, running):
        assert (await orchestrator.failure(fence)).error.kind == "EngineDied"
    await orchestrator.until(lambda: not orchestrator.beats[-1].healthy)
    await registered(rig)
    with pytest.raises(Unavailable, match="device is lost"):
        await decode.shell.check_health()
    refused = await orchestrator.submit(TOKENS, 4)
    assert (await orchestrator.failure(refused)).error.kind == "NodeRefused"
    prefill_engine.pipeline.gate.set()
    await at_rest(prefill)
    assert decode.in_flight == 0


async def test_the_death_of_a_prefill_engine_costs_its_hand_overs_a_retry(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.break_with = RuntimeError("the device is lost")
    fence = await orchestrator.submit(TOKENS, 6, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 6)
    assert decode.counters.value("pull_failed", "engine_died") == 1
    assert prefill.shell.unhealthy_reason() is not None and prefill.in_flight == 0


async def test_a_port_in_use_is_named_and_leaves_nothing_running(rig: Rig) -> None:
    decode, _ = await rig.decode()
    port = int(decode.shell.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match=str(port)):
        await rig.decode("decode-2", port=port)


async def test_status_tells_of_the_batches_that_were_computed(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    await orchestrator.result(await orchestrator.submit(TOKENS, 6, target(prefill)))
    await at_rest(prefill, decode)
    of_prefill, of_decode = [await rig.status(node) for node in (prefill, decode)]
    assert of_prefill.counters["batches.CE"] == 3 and of_prefill.counters["prompt_tokens"] == len(TOKENS)
    assert of_decode.counters["batches.TG"] == 5 and of_decode.counters["prompt_tokens"] == 0
    assert (of_prefill.counters["generated_tokens"], of_decode.counters["generated_tokens"]) == (1, 5)
    assert of_prefill.prompt_throughput > 0 and of_decode.generation_throughput > 0
