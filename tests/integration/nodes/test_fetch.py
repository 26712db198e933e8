"""Blocks that one node has and another needs: fetched over gRPC before a prompt is computed."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
import pytest

from decode_nodes.node import DecodeNode
from kvcache import fetch
from kvcache.fetch import FetchRequest
from kvcache.transfer import (
    IN_FRAMES,
    SHARED_FRAME_BYTES,
    BlocksFrame,
    Carriage,
    MessageFrame,
    decode,
    encode_shared,
    is_shared,
)
from pipelines.node import fetch_service
from pronghorn.clock import ManualClock
from tests.fakes.cache_hints import chain, hint
from tests.fakes.canary_pipeline import block_bytes, continuation
from tests.integration.nodes.rig import Node, Orchestrator, Rig, at_rest, holds, prompt, target

SHARED = prompt(20, 0)


def asks(orchestrator: Orchestrator, tokens: list[int], *targets: object, **more: object):
    return orchestrator.submit(tokens, 4, *targets, **more)


async def computed(rig: Rig, node: Node) -> int:
    return (await rig.status(node)).counters.get("prompt_tokens", 0)


@pytest.mark.conformance(41)
async def test_a_prefill_node_fetches_what_the_hint_says_another_one_has(rig: Rig) -> None:
    first, one = await rig.prefill("prefill-1")
    second, two = await rig.prefill("prefill-2")
    decode_node, _ = await rig.decode(enable_prefix_caching=False)
    await rig.registered(first, second)
    orchestrator = await rig.orchestrator(decode_node)
    await orchestrator.result(await asks(orchestrator, [*SHARED, 1], target(first)))
    tail = [*SHARED, 2, 3]
    fence = await asks(orchestrator, tail, target(second), hint=hint(SHARED, prefill_1=20))
    assert await orchestrator.result(fence) == continuation(tail, 4)
    assert second.counters.value("blocks_fetched") == 20
    assert two.pipeline.computed_tokens == 2
    assert orchestrator.deltas[fence][0].num_cached_tokens == 80
    assert orchestrator.deltas[fence][0].fetched_bytes == {"prefill-1": 20 * block_bytes(4)}
    await at_rest(first, second, decode_node)


async def test_a_decode_node_fetches_before_it_prefills_locally(rig: Rig) -> None:
    first, _ = await rig.decode("decode-1")
    second, two = await rig.decode("decode-2")
    await rig.registered(first, second)
    one, other = await rig.orchestrator(first), await rig.orchestrator(second)
    await one.result(await asks(one, [*SHARED, 1]))
    fence = await asks(other, [*SHARED, 2], hint=hint(SHARED, decode_1=20))
    assert await other.result(fence) == continuation([*SHARED, 2], 4)
    assert two.pipeline.computed_tokens <= 1 + 4 and second.counters.value("blocks_fetched") == 20
    assert other.deltas[fence][0].num_cached_tokens == 80
    assert other.deltas[fence][0].fetched_bytes == {"decode-1": 20 * block_bytes(4)}
    await at_rest(first, second)


async def test_a_decode_node_fetches_what_others_have_when_no_prefill_node_could_hand_over(rig: Rig) -> None:
    holder, _ = await rig.decode("decode-1")
    second, two = await rig.decode("decode-2")
    dead, _ = await rig.prefill("prefill-1")
    await rig.registered(holder, second, dead)
    one, other = await rig.orchestrator(holder), await rig.orchestrator(second)
    await one.result(await asks(one, [*SHARED, 1]))
    gone = target(dead)
    await dead.shell.stop()
    fence = await asks(other, [*SHARED, 2], gone, hint=hint(SHARED, decode_1=20, prefill_1=20))
    assert await other.result(fence) == continuation([*SHARED, 2], 4)
    assert second.counters.value("prefill_fallback.local") == 1
    assert second.counters.value("blocks_fetched") == 20
    assert two.pipeline.computed_tokens <= 1 + 4
    assert other.deltas[fence][0].num_cached_tokens == 80
    assert other.deltas[fence][0].fetched_bytes == {"decode-1": 20 * block_bytes(4)}
    await at_rest(holder, second)


async def test_what_several_nodes_have_comes_from_all_of_them(rig: Rig) -> None:
    nodes = [(await rig.decode(f"decode-{i}"))[0] for i in (1, 2, 3)]
    await rig.registered(*nodes)
    orchestrators = [await rig.orchestrator(node) for node in nodes]
    for orchestrator in orchestrators[:2]:
        await orchestrator.result(await asks(orchestrator, [*SHARED, 1]))
    fence = await asks(orchestrators[2], [*SHARED, 2], hint=hint(SHARED, decode_1=20, decode_2=20))
    assert await orchestrators[2].result(fence) == continuation([*SHARED, 2], 4)
    assert nodes[2].counters.value("blocks_fetched") == 20
    assert all(node.counters.value("blocks_lent") >= 8 for node in nodes[:2])


async def test_prompts_that_come_everywhere_at_once_compute_what_they_share_once(rig: Rig) -> None:
    first, one = await rig.prefill("prefill-1", model_path="canary:?step_s=0.02")
    second, two = await rig.prefill("prefill-2", model_path="canary:?step_s=0.02")
    decode_node, _ = await rig.decode(enable_prefix_caching=False)
    await rig.registered(first, second)
    orchestrator = await rig.orchestrator(decode_node)
    known = hint(SHARED, prefill_1=20)
    prompts = [[*SHARED, 100 + i] for i in range(6)]
    fences = [
        await asks(orchestrator, tokens, target(second if i % 2 else first), hint=known)
        for i, tokens in enumerate(prompts)
    ]
    for fence, tokens in zip(fences, prompts, strict=True):
        assert await orchestrator.result(fence) == continuation(tokens, 4)
    assert one.pipeline.computed_tokens + two.pipeline.computed_tokens == len(SHARED) + len(prompts)


@pytest.mark.conformance(38)
@pytest.mark.parametrize("how", ["dead", "evicted", "another salt", "unknown name", "itself", "too deep"])
async def test_a_hint_of_no_use_costs_a_recompute_and_nothing_else(rig: Rig, how: str) -> None:
    first, _ = await rig.decode("decode-1")
    second, _ = await rig.decode("decode-2", stall_timeout_s=0.5)
    await rig.registered(first, second)
    one, other = await rig.orchestrator(first), await rig.orchestrator(second)
    await one.result(await asks(one, [*SHARED, 1]))
    said = hint(SHARED, decode_1=20)
    match how:
        case "dead":
            await first.shell._service.stop(0.0)  # its row stays
        case "evicted":
            first.shell.drop_prefix_cache()
        case "another salt":
            said = hint(SHARED, "salt", decode_1=20)
        case "unknown name":
            said = hint(SHARED, decode_9=20)
        case "itself":
            said = hint(SHARED, decode_2=20)
        case "too deep":
            said["instances"][0]["blocks"] = 99
    fence = await asks(other, [*SHARED, 2], hint=said)
    assert await other.result(fence) == continuation([*SHARED, 2], 4)
    assert second.counters.value("blocks_fetched") == 0
    assert other.deltas[fence][0].num_cached_tokens == 0
    await at_rest(second)


async def test_a_replayed_hint_of_another_tenant_asks_nobody(rig: Rig) -> None:
    first, _ = await rig.decode("decode-1")
    second, _ = await rig.decode("decode-2")
    await rig.registered(first, second)
    one, other = await rig.orchestrator(first), await rig.orchestrator(second)
    await one.result(await asks(one, [*SHARED, 1], salt="tenant-a"))
    fence = await asks(other, [*SHARED, 2], salt="tenant-b", hint=hint(SHARED, "tenant-a", decode_1=20))
    assert await other.result(fence) == continuation([*SHARED, 2], 4)
    assert first.counters.value("fetch_served") + first.counters.value("fetch_refused") == 0
    assert second.counters.value("cache_hint_miss", "wrong_hash") == 1


async def test_a_request_that_is_cancelled_while_its_prefix_comes_leaves_nothing(rig: Rig) -> None:
    first, engine = await rig.decode("decode-1")
    second, _ = await rig.decode("decode-2")
    await rig.registered(first, second)
    one, other = await rig.orchestrator(first), await rig.orchestrator(second)
    await one.result(await asks(one, [*SHARED, 1]))
    engine.hold_after(0)
    held = await asks(one, prompt(3))
    await engine.is_held()  # a lease waits for the end of the step
    fence = await asks(other, [*SHARED, 2], hint=hint(SHARED, decode_1=20))
    async with asyncio.timeout(60.0):
        while not second.shell.exchange.held():  # noqa: ASYNC110  # asked from outside, which no event reaches
            await asyncio.sleep(0.005)
    await other.abort(fence)
    await at_rest(second)
    engine.pipeline.gate.set()
    await one.result(held)
    await at_rest(first)
    assert not second.shell.exchange.held() and not first.shell.exchange.held()


async def test_a_fault_while_one_prompt_is_brought_ends_its_hand_over_and_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, engine = await rig.prefill()
    decode_node, _ = await rig.decode(stall_timeout_s=5.0)
    orchestrator = await rig.orchestrator(decode_node)
    engine.pipeline.gate.clear()
    held = await asks(orchestrator, prompt(3), target(node))
    await holds(node)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault in the loader")

    monkeypatch.setattr(node.shell.exchange.loader, "brought", broken)
    for last in (1, 2):
        fence = await asks(orchestrator, [*SHARED, last], target(node), hint=hint(SHARED, prefill_1=20), budget_s=5.0)
        assert await orchestrator.result(fence) == continuation([*SHARED, last], 4)
    engine.pipeline.gate.set()
    assert await orchestrator.result(held) == continuation(prompt(3), 4)
    assert decode_node.counters.value("pull_failed", "internal_error") == 2
    assert decode_node.counters.value("pull_committed") == 1
    await at_rest(node, decode_node)


def request(node: DecodeNode, hashes: list, **changes: object) -> FetchRequest:
    fields = {
        "asker": node.shell.identity,
        "holder_incarnation": node.shell.incarnation,
        "hashes": hashes,
        "budget_s": 5.0,
        "patience_s": 0.0,
    }
    return FetchRequest(**(fields | changes))


async def words(frames: AsyncGenerator[bytes, None]) -> list[object]:
    said: list[object] = []
    async for data in frames:
        if is_shared(data):  # which only who has mapped the memory can read
            said.append(data)
            continue
        frame = decode(data)
        said.append(fetch.decode(frame.payload) if isinstance(frame, MessageFrame) else frame)
    return said


async def test_a_fetch_for_an_earlier_life_or_of_another_seed_is_declined(rig: Rig) -> None:
    node, _ = await rig.decode()
    service = node.shell.exchange._service
    hashes = chain(SHARED)
    [declined] = await words(service.frames(request(node, hashes, holder_incarnation="0" * 32).to_bytes()))
    assert isinstance(declined, fetch.Declined) and declined.error.param == "incarnation"
    stranger = msgspec.structs.replace(node.shell.identity, seed_digest="another")
    [declined] = await words(service.frames(request(node, hashes, asker=stranger).to_bytes()))
    assert isinstance(declined, fetch.Declined) and declined.error.param == "seed_digest"
    for garbage in (b"\xff", request(node, []).to_bytes()):
        [declined] = await words(service.frames(garbage))
        assert isinstance(declined, fetch.Declined)


def carriages(node: DecodeNode) -> dict[str, Carriage]:
    place = node.shell.link.memory.place
    return {"in frames": IN_FRAMES, "shared memory": Carriage(partial(encode_shared, place=place), SHARED_FRAME_BYTES)}


@pytest.mark.field("Mooncake#4239")
@pytest.mark.field("vllm#21570")
@pytest.mark.parametrize("way", ["in frames", "shared memory"])
@pytest.mark.parametrize("blocks", [1, 20], ids=["single", "batch"])
async def test_reading_after_the_lease_has_ended_gives_expired_and_no_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, blocks: int, way: str
) -> None:
    node, _ = await rig.decode()
    orchestrator = await rig.orchestrator(node)
    await orchestrator.result(await asks(orchestrator, [*SHARED, 1]))
    monkeypatch.setattr(fetch_service, "LEASE_S", 0.0)
    asked = request(node, chain(SHARED)[:blocks]).to_bytes()
    said = await words(node.shell.exchange._service.frames(asked, carriages(node)[way]))
    assert isinstance(said[-1], fetch.Declined) and said[-1].error.code == fetch.EXPIRED
    assert not any(isinstance(word, BlocksFrame | bytes) for word in said)
    assert node.counters.value("blocks_lent") == 0
    await at_rest(node)


@pytest.mark.field("Mooncake#4239")
@pytest.mark.parametrize("way", ["in frames", "shared memory"])
async def test_a_stream_whose_lease_ends_under_way_gives_expired_and_no_more_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Mooncake#4239: of the ways to read, one went on serving bytes after the lease had ended."""
    node, _ = await rig.decode()
    orchestrator = await rig.orchestrator(node)
    await orchestrator.result(await asks(orchestrator, [*SHARED, 1]))
    service, clock = node.shell.exchange._service, ManualClock(rig.clock.now_s())
    monkeypatch.setattr(service, "_clock", clock)
    block_by_block = carriages(node)[way]._replace(frame_bytes=1)
    lent: list[int] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        async for frame in service.frames(request(node, chain(SHARED)).to_bytes(), block_by_block):
            yield frame
            lent.append(node.counters.value("blocks_lent"))
            if lent[-1] == 5:
                clock.advance(fetch_service.LEASE_S)

    said = await words(frames())
    assert isinstance(said[-1], fetch.Declined) and said[-1].error.code == fetch.EXPIRED
    assert max(lent) == 5
    await at_rest(node)
