"""The operations port of a node: it answers whatever the engine does, and tells the truth of it."""

import asyncio
import os
import signal

import httpx
import msgspec
import psutil
import pytest

from operations.port import ROUTES
from pronghorn.ledger import Kind, Ledger
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import PATIENCE_S, Node, Rig, at_rest, holds, lets_go, prompt, target

DECODE = "tests.fakes.canary_decode"


class Port:
    """The operations port of a node, asked over HTTP."""

    def __init__(self, node: Node) -> None:
        assert node.shell.operations_address is not None
        self._base = f"http://{node.shell.operations_address}"

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._base, timeout=PATIENCE_S, trust_env=False) as client:
            return await client.get(path)

    async def ledger(self) -> Ledger:
        return msgspec.json.decode((await self.get("/internal/ledger")).content, type=Ledger)

    async def until_ready(self, status: int) -> str:
        """Wait until `/ready` answers so; its reason."""
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await self.get("/ready")).status_code != status:  # noqa: ASYNC110  # asked from outside
                await asyncio.sleep(0.02)
        reason: str = answer.json()["reason"]
        return reason


async def port_of(node: Node) -> Port:
    await node.shell.serve_operations()
    return Port(node)


async def test_every_route_answers(rig: Rig) -> None:
    node, _ = await rig.decode()
    port = await port_of(node)
    for path in ROUTES:
        assert (await port.get(path)).status_code == 200, path
    assert (await port.get("/nothing")).status_code == 404


async def test_the_ledger_names_what_a_request_holds_and_nothing_once_it_has_ended(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(model_path="canary:?step_s=0.05")
    port, prefill_port = await port_of(decode), await port_of(prefill)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(prompt(5), 200, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.tokens(fence)) > 1)
    ledger = await port.ledger()
    assert ledger.engine_answered and ledger.incarnation == decode.shell.incarnation
    [attempt], [sequence] = ledger.of(Kind.ATTEMPT), ledger.of(Kind.SEQUENCE)
    assert attempt.owner == sequence.owner == str(fence) and attempt.note == "running"
    assert attempt.age_s is not None and sequence.age_s is not None
    [session] = ledger.of(Kind.SESSION)
    assert session.peer == attempt.peer and session.owner == "orchestrator-1"
    [blocks] = ledger.of(Kind.BLOCKS)
    assert blocks.owner == str(fence) and blocks.count >= 6
    assert [channel.owner for channel in ledger.of(Kind.CHANNEL)] == [prefill.shell.address]
    text = (await port.get("/metrics")).text
    assert 'pronghorn:held{kind="attempt",model_name="canary",role="decode"} 1.0' in text
    assert 'pronghorn:num_requests_running{model_name="canary",role="decode"} 1.0' in text
    await orchestrator.abort(fence)
    await at_rest(prefill, decode)
    assert (await port.ledger()).at_rest and (await prefill_port.ledger()).at_rest
    text = (await port.get("/metrics")).text
    assert 'pronghorn:held{kind="blocks",model_name="canary",role="decode"} 0.0' in text
    assert 'pronghorn:events_total{event="aborted",model_name="canary",reason="",role="decode"} 1.0' in text


async def test_a_hand_over_that_is_being_read_stands_in_both_ledgers(rig: Rig) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    port, prefill_port = await port_of(decode), await port_of(prefill)
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(prompt(5), 4, target(prefill))
    await holds(prefill)
    [hand_over] = (await prefill_port.ledger()).of(Kind.HAND_OVER)
    [pull] = (await port.ledger()).of(Kind.PULL)
    assert hand_over.owner == pull.owner == str(fence)
    assert (hand_over.peer, pull.peer) == (decode.shell.incarnation, prefill.shell.incarnation)
    engine.open_gates()
    assert await orchestrator.result(fence) == continuation(prompt(5), 4)
    await at_rest(prefill, decode)


@pytest.mark.field("dynamo#13675")
async def test_a_wedged_engine_makes_the_node_unready_and_leaves_it_alive(rig: Rig) -> None:
    """TensorRT-LLM#5820, #11715, #13713: a cancel wedged the server while /health said 200."""
    node, engine = await rig.decode()
    port = await port_of(node)
    orchestrator = await rig.orchestrator(node)
    await port.until_ready(200)
    engine.hold_after(3)
    fence = await orchestrator.submit(prompt(3), 50)
    await orchestrator.until(lambda: bool(orchestrator.tokens(fence)))
    await orchestrator.abort(fence)
    assert "said nothing" in await port.until_ready(503)
    assert (await port.get("/health")).status_code == 200
    ledger = await port.ledger()
    assert not ledger.engine_answered and not ledger.at_rest
    engine.open_gates()
    await port.until_ready(200)
    await at_rest(node)
    assert (await port.ledger()).at_rest


@pytest.mark.field("dynamo#8592")
async def test_a_stopped_engine_process_makes_the_node_unready_until_it_goes_on(rig: Rig) -> None:
    node = await rig.decode_over(rig.process(DECODE))
    port = await port_of(node)
    await port.until_ready(200)
    [engine] = [child for child in psutil.Process().children() if DECODE in child.cmdline()]
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        assert "said nothing" in await port.until_ready(503)
        assert (await port.get("/health")).status_code == 200
        assert 'pronghorn:ready{model_name="canary",role="decode"} 0.0' in (await port.get("/metrics")).text
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    await port.until_ready(200)


async def test_a_pool_that_does_not_drain_makes_the_node_unready(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell forgets to tell its engine of an end: the blocks stay, and the node says whose."""
    prefill, engine = await rig.prefill()
    node, _ = await rig.decode(stall_timeout_s=60.0)
    port = await port_of(node)
    orchestrator = await rig.orchestrator(node)
    engine.pipeline.gate.clear()
    fence = await orchestrator.submit(prompt(3), 4, target(prefill))
    await holds(prefill)
    released: list[object] = []
    monkeypatch.setattr(node.shell.link, "release", released.append)
    await orchestrator.abort(fence)
    await lets_go(node)
    reason = await port.until_ready(503)
    assert "does not drain" in reason and str(fence) in reason
    assert released == [fence]
    monkeypatch.undo()
    node.shell.link.release(fence)
    await port.until_ready(200)


async def test_a_dead_prefill_node_never_makes_a_decode_node_unready(rig: Rig) -> None:
    """sglang#12779, #13657: the death of prefill took decode with it."""
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    port = await port_of(decode)
    gone = target(prefill)
    await prefill.shell.stop()
    orchestrator = await rig.orchestrator(decode)
    assert await orchestrator.result(await orchestrator.submit(prompt(3), 4, gone)) == continuation(prompt(3), 4)
    assert (await port.get("/ready")).status_code == 200


async def test_a_pool_full_of_dead_requests_empties_by_timer(rig: Rig) -> None:
    """TensorRT-LLM#12313: clean-up ran only when another request came. Here prefill is wedged and nothing comes."""
    prefill, engine = await rig.prefill(stall_timeout_s=60.0)
    decode, _ = await rig.decode(num_blocks=12, stall_timeout_s=60.0)
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    fences = [
        await orchestrator.submit(prompt(5, start=i), 4, target(prefill), budget_s=0.5, only_these=True)
        for i in range(6)
    ]
    for fence in fences:
        assert (await orchestrator.failure(fence)).error.kind == "DeadlineExceeded"
    await at_rest(decode)
    await lets_go(prefill)
    engine.open_gates()
    await at_rest(prefill)


async def test_what_was_handed_over_is_let_go_of_at_once_though_the_request_runs_on(rig: Rig) -> None:
    """vllm#58188: a finished push was never reported, and prefill held its blocks until the lease."""
    prefill, _ = await rig.prefill()
    decode, engine = await rig.decode()
    engine.hold_after(3)
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(prompt(5), 40, target(prefill))
    await orchestrator.until(lambda: len(orchestrator.tokens(fence)) > 1)
    await at_rest(prefill)
    assert not orchestrator.is_done(fence)
    await orchestrator.abort(fence)
    engine.open_gates()
    await at_rest(decode)


async def test_a_decode_node_that_dies_before_it_admits_leaves_prefill_nothing_to_hold(rig: Rig) -> None:
    """vllm#38027, llm-d#1138: who asked is gone between the end of the prefill and the admission."""
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    engine.pipeline.gate.clear()
    await orchestrator.submit(prompt(5), 4, target(prefill))
    await holds(prefill)
    await decode.shell.stop()
    engine.open_gates()
    await at_rest(prefill)
