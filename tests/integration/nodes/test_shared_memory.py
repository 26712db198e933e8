"""Real nodes on one host: blocks through shared memory, what is left of it after a kill, and the way round it."""

import asyncio

import pytest

from decode_nodes.node import DecodeNode
from pipelines.node import local_connection
from pipelines.node.local_client import LocalStreamClient
from pipelines.types.frames import PrefillTarget
from tests.fakes.cache_hints import hint
from tests.fakes.canary_pipeline import continuation
from tests.fakes.node_process import node_process
from tests.integration.nodes.rig import PATIENCE_S, Rig, at_rest, prompt, target

pytestmark = pytest.mark.skipif(not local_connection.SUPPORTED, reason="shared memory between nodes is Linux's")

TOKENS = prompt(20)


def ways(node: DecodeNode) -> tuple[int, int]:
    """Streams opened through shared memory, and over gRPC."""
    return node.counters.value("stream_opened", "shared_memory"), node.counters.value("stream_opened", "grpc")


def mapped(node: DecodeNode) -> int:
    client = node._prefill
    assert isinstance(client, LocalStreamClient)
    return client.mapped


async def test_a_hand_over_goes_through_shared_memory(rig: Rig) -> None:
    rig.shared_memory = True
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(enable_prefix_caching=False)
    orchestrator = await rig.orchestrator(decode)
    for _ in range(2):
        fence = await orchestrator.submit(TOKENS, 4, target(prefill))
        assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert ways(decode) == (2, 0) and decode.counters.value("pull_committed") == 2
    await at_rest(prefill, decode)


async def test_a_fetch_goes_through_shared_memory(rig: Rig) -> None:
    rig.shared_memory = True
    first, _ = await rig.decode("decode-1")
    second, _ = await rig.decode("decode-2")
    await rig.registered(first, second)
    one, other = await rig.orchestrator(first), await rig.orchestrator(second)
    await one.result(await one.submit(TOKENS, 4))
    fence = await other.submit([*TOKENS, 2], 4, hint=hint(TOKENS[:80], decode_1=20))
    assert await other.result(fence) == continuation([*TOKENS, 2], 4)
    assert second.counters.value("blocks_fetched") == 20 and ways(second) == (1, 0)
    await at_rest(first, second)


async def test_a_node_that_shares_nothing_is_asked_over_grpc(rig: Rig) -> None:
    prefill, _ = await rig.prefill()
    rig.shared_memory = True
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    fence = await orchestrator.submit(TOKENS, 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert ways(decode) == (0, 1) and decode.counters.value("pull_committed") == 1
    await at_rest(prefill, decode)


async def test_another_users_memory_is_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.shared_memory = True
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode()
    orchestrator = await rig.orchestrator(decode)
    monkeypatch.setattr(local_connection, "is_ours", lambda connected: False)
    fence = await orchestrator.submit(TOKENS, 4, target(prefill))
    assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert ways(decode) == (0, 1) and decode.counters.value("shared_memory_refused", "uid") == 1
    await at_rest(prefill, decode)


async def test_who_refuses_a_connection_is_asked_over_grpc_from_then_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.shared_memory = True
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(enable_prefix_caching=False)
    orchestrator = await rig.orchestrator(decode)
    monkeypatch.setattr("pipelines.node.local_server.MAX_CONNECTIONS", 0)
    for _ in range(2):
        fence = await orchestrator.submit(TOKENS, 4, target(prefill))
        assert await orchestrator.result(fence) == continuation(TOKENS, 4)
    assert ways(decode) == (1, 1) and decode.counters.value("shared_memory_refused", "broken") == 1
    assert decode.counters.value("pull_committed") == 1
    await at_rest(prefill, decode)


@pytest.mark.parametrize("end", ["killed", "killed in a hand-over"])
async def test_a_killed_node_leaves_nothing_mapped_and_costs_no_token(rig: Rig, end: str) -> None:
    rig.shared_memory = True
    slow = "canary:?step_s=0.05" if end == "killed in a hand-over" else "canary:"
    async with node_process("prefill", "prefill-1", shared_memory=True, model_path=slow) as process:
        record = process.record
        asked = PrefillTarget(record.name, record.address, record.incarnation)
        decode, _ = await rig.decode()
        orchestrator = await rig.orchestrator(decode)
        fence = await orchestrator.submit(TOKENS, 4, asked)
        if end == "killed":
            assert await orchestrator.result(fence) == continuation(TOKENS, 4)
            assert ways(decode) == (1, 0) and mapped(decode) == 1
            process.kill()
        else:
            async with asyncio.timeout(PATIENCE_S):
                while mapped(decode) == 0:  # noqa: ASYNC110  # blocks have come; no event tells
                    await asyncio.sleep(0.005)
            process.kill()
            assert await orchestrator.result(fence) == continuation(TOKENS, 4)
            assert decode.counters.value("pull_failed", "node_lost") == 1
        async with asyncio.timeout(PATIENCE_S):
            while mapped(decode):  # noqa: ASYNC110  # the end of a socket is no event of ours
                await asyncio.sleep(0.005)
        async with asyncio.timeout(PATIENCE_S):  # the kernel ends a process's sockets one after another
            while (left := local_connection.connect(record.incarnation)) is not None:
                left.close()
                await asyncio.sleep(0.005)
        other = prompt(20, start=3)
        fence = await orchestrator.submit(other, 4, asked)
        assert await orchestrator.result(fence) == continuation(other, 4)
        await at_rest(decode)
