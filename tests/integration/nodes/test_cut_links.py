"""The link between a decode and a prefill node is cut, held up, reset or garbled in each phase of a hand-over.

Every answer is the whole and right one, and both nodes let go: the prefill node too, which nobody tells that its asker
has gone.
"""

import contextlib
from collections.abc import Callable

import msgspec
import pytest

from cluster.chaos.cut_proxy import DOWN, UP, CutProxy, cut_proxy
from kvcache import transfer
from pipelines.types.handover import FirstToken, Welcome
from tests.fakes.canary_pipeline import continuation
from tests.integration.nodes.rig import Rig, at_rest, holds, lets_go, prompt, target
from tests.integration.nodes.test_faults import before

TOKENS = prompt(5)
EXPECTED = continuation(TOKENS, 6)

Cut = Callable[[CutProxy], None]
CUTS: dict[str, Cut] = {
    "black hole": lambda proxy: proxy.drop(),
    "black hole for what is asked": lambda proxy: proxy.drop(UP),
    "black hole for what is answered": lambda proxy: proxy.drop(DOWN),
    "down": lambda proxy: proxy.hold(),
    "down one way": lambda proxy: proxy.hold(DOWN),
    "reset": lambda proxy: proxy.reset(),
}
cuts = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)


@pytest.mark.cells("F5 P2", "F5 P4-P5", "F5 P7", "F6 P2", "F6 P4-P5", "F6 P7", "F8 P2", "F8 P4-P5", "F8 P7")
@pytest.mark.field("vllm#50754", "dynamo#7489")
@cuts
@pytest.mark.parametrize("kind", [Welcome, transfer.BlocksFrame, FirstToken, transfer.CommitFrame])
async def test_a_link_that_is_cut_in_any_phase_costs_no_token(rig: Rig, cut: Cut, kind: type) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(stall_timeout_s=0.2)
    orchestrator = await rig.orchestrator(decode)
    async with contextlib.AsyncExitStack() as stack:
        proxies: list[CutProxy] = []

        async def happens() -> None:
            cut(proxies[0])

        front = await rig.in_front_of(prefill, before(kind, happens))
        proxies.append(await stack.enter_async_context(cut_proxy(front.target.address)))
        through = msgspec.structs.replace(front.target, address=proxies[0].address)
        fence = await orchestrator.submit(TOKENS, 6, through)
        assert await orchestrator.result(fence) == EXPECTED
        await at_rest(prefill, decode)


@pytest.mark.cells("F5 P3", "F6 P3", "F8 P3")
@pytest.mark.field("vllm#38027", "dynamo#11068")
@cuts
async def test_a_prefill_node_lets_go_of_a_decode_node_that_it_no_longer_hears(rig: Rig, cut: Cut) -> None:
    prefill, engine = await rig.prefill()
    decode, _ = await rig.decode(stall_timeout_s=0.2)
    orchestrator = await rig.orchestrator(decode)
    async with cut_proxy(prefill.shell.address) as proxy:
        engine.pipeline.gate.clear()
        fence = await orchestrator.submit(TOKENS, 6, target(prefill, address=proxy.address))
        await holds(prefill)
        cut(proxy)
        assert await orchestrator.result(fence) == EXPECTED
        await lets_go(prefill)
        engine.pipeline.gate.set()
        await at_rest(prefill, decode)
        assert prefill.counters.value("hand_over_ended", "computing") == 1


@pytest.mark.field("sglang#36033")
@pytest.mark.parametrize("ways", [(UP,), (DOWN,)])
@pytest.mark.parametrize("offset", [0, 3, 9, 40, 200, 400, 700, 1000])
async def test_a_byte_that_is_flipped_anywhere_costs_no_token(rig: Rig, offset: int, ways: tuple[str, ...]) -> None:
    prefill, _ = await rig.prefill()
    decode, _ = await rig.decode(stall_timeout_s=0.2)
    orchestrator = await rig.orchestrator(decode)
    async with cut_proxy(prefill.shell.address) as proxy:
        through = target(prefill, address=proxy.address)
        warm = await orchestrator.submit(prompt(1, start=77), 2, through)
        assert await orchestrator.result(warm) == continuation(prompt(1, start=77), 2)
        proxy.corrupt(offset, *ways)
        fence = await orchestrator.submit(TOKENS, 6, through)
        assert await orchestrator.result(fence) == EXPECTED
        await at_rest(prefill, decode)
