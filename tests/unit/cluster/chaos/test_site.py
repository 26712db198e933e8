"""What can be done to a cluster of which nothing but its URL is known, and what it is found to hold."""

from collections import Counter
from typing import Any

import httpx
import pytest

from cluster.chaos.runner import Runner
from cluster.chaos.scenario import KINDS, Drain, Fault, Kill, RedisFlush, Scenario, When, read
from cluster.chaos.site import Site

NOW = When(s=0.0)
ANYWHERE = {"drain", "leave-storm", "overload", "garbage", "forget-prefixes"}


def node(name: str, role: str, **more: Any) -> dict[str, Any]:
    counts = ("in_flight", "total_blocks", "free_blocks", "held_blocks", "cached_blocks", "waiting", "running")
    report: dict[str, Any] = dict.fromkeys((*counts, "awaiting_blocks"), 0)
    return report | {"name": name, "role": role, "model": "m", "address": f"{name}:1", "incarnation": f"life-{name}",
                     "healthy": True} | more  # fmt: skip


class Told(Site):
    """A site whose orchestrator says what a test lets it."""

    def __init__(self, *nodes: dict[str, Any], ready: bool = True, in_flight: int = 0) -> None:
        super().__init__("http://cluster")
        model = {"name": "m", "ready": ready, "reason": "", "in_flight": in_flight}
        self.said = {"models": [model], "ready": ready, "reason": "", "in_flight": in_flight, "nodes": list(nodes)}

    @property
    def http(self) -> httpx.AsyncClient:
        answer = httpx.MockTransport(lambda _: httpx.Response(200, json=self.said))
        return httpx.AsyncClient(base_url=self.url, transport=answer)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_needs_more_than_the_api_is_refused_by_its_name(name: str) -> None:
    text = {
        "kill": "process: decode", "stop": "process: decode, for_s: 1", "cut": "node: decode, for_s: 1",
        "black-hole": "node: decode, for_s: 1", "reset": "node: decode", "flip": "node: decode",
        "drain": "node: decode",
        "delay": "node: decode, for_s: 1, by_s: 1", "slow": "node: decode, for_s: 1, bytes_per_s: 1",
        "scale": "node: decode, to: 1", "leave-storm": "requests: 1", "overload": "times: 1, for_s: 1",
        "garbage": "requests: 1", "redis-pause": "for_s: 1",
        "raylet-kill": "node: decode", "gcs-kill": "for_s: 1",
        "out-of-memory": "process: decode", "lose-packets": "percent: 5, for_s: 1", "fill-disk": "for_s: 1",
    }  # fmt: skip
    fields = f", {text[name]}" if name in text else ""
    scenario = read(
        f"about: x\ncluster: {{machines: 2, disks: 1}}\nfaults: [{{kind: {name}, at: {{s: 0}}{fields}}}]", "x"
    )
    [fault] = scenario.faults
    refused = Site("http://elsewhere").refusal(fault)
    if name in ANYWHERE:
        assert refused is None
    else:
        assert refused is not None and refused.startswith(name) and "http://elsewhere" in refused


@pytest.mark.parametrize("fault", [Kill(at=NOW, process="decode"), RedisFlush(at=NOW)])
async def test_a_scenario_that_cannot_be_run_is_an_outcome_with_its_reason(fault: Fault) -> None:
    outcome = await Runner(Told(node("d", "decode")), seed=0).run(Scenario("x", "about", [fault]))
    assert outcome.refused is not None and "this machine" in outcome.refused
    assert outcome.count == 0


async def test_a_cluster_that_is_too_small_is_told_what_it_lacks() -> None:
    scenario = read("about: x\ncluster: {decode: 2}\nfaults: []", "x")
    outcome = await Runner(Told(node("p", "prefill"), node("d", "decode")), seed=0).run(scenario)
    assert outcome.refused == "it needs 2 decode nodes, and the cluster has 1"


async def test_what_no_cluster_here_can_have_is_said() -> None:
    scenario = read("about: x\nneeds: [another clock]\nfaults: []", "x")
    outcome = await Runner(Told(), seed=0).run(scenario)
    assert outcome.refused is not None and "needs another clock" in outcome.refused


async def test_victims_are_healthy_nodes_of_the_pool_the_busiest_first() -> None:
    site = Told(
        node("a", "decode", in_flight=1), node("b", "decode", in_flight=3), node("c", "decode", healthy=False),
        node("p", "prefill", in_flight=9),
    )  # fmt: skip
    assert [process.name for process in await site.processes("decode")] == ["b", "a"]


async def test_it_is_whole_when_ready_with_every_pool_as_large_and_without_the_lives_that_ended() -> None:
    before = Counter(prefill=1, decode=1)
    nodes = node("p", "prefill"), node("d", "decode")
    assert await Told(*nodes).is_whole(before, set())
    assert not await Told(*nodes, ready=False).is_whole(before, set())
    assert not await Told(node("d", "decode")).is_whole(before, set())
    assert not await Told(node("p", "prefill"), node("d", "decode", draining=True)).is_whole(before, set())
    assert not await Told(*nodes).is_whole(before, {"life-d"})  # type: ignore[arg-type]


async def test_what_is_held_when_all_has_ended_is_left_over() -> None:
    assert await Told(node("d", "decode")).leftovers(0.0) == []
    left = await Told(node("d", "decode", held_blocks=3), in_flight=1).leftovers(0.0)
    assert left == ["d: 3 blocks held, 0 in flight", "orchestrator: 1 in flight"]


def test_a_drain_needs_nothing_but_the_nodes_own_server() -> None:
    assert Site("http://elsewhere").refusal(Drain(at=NOW, node="decode")) is None
