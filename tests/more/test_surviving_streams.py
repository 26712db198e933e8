"""Nodes are killed, stopped and cut off under sixteen streams of the real model: every text is the undisturbed run's.

Two nodes of each kind, each behind a proxy. What is done is done at a moment that the streams or the bytes on the link
set, never at a time.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.chaos.cut_proxy import DOWN, UP
from cluster.chaos.links import ADVERTISED
from kvcache.registry import NodeRecord
from tests.fakes.proxied_nodes import ProxiedNodes, proxied_nodes
from tests.fakes.recorded_streams import STREAMS, RecordedStreams
from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

NAME = "survive"
REPLACED_S = 120.0
PROMPT_TOKENS, LONG_PROMPT_TOKENS = 40, 200
NEW_TOKENS = 48


class Rig:
    def __init__(self, cluster: RunningCluster, nodes: ProxiedNodes) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.undo: list[Callable[[], None]] = []
        self.done = 0

    def busiest(self, role: str) -> NodeRecord:
        """The healthy node of that kind with the most in flight."""
        status: dict[str, Any] = httpx.get(f"{self.cluster.url}/internal/status", trust_env=False).json()
        load = {node["name"]: node["in_flight"] for node in status["nodes"] if node["role"] == role and node["healthy"]}
        return self.nodes.records()[max(load, key=lambda name: load[name])]

    def kill(self, node: NodeRecord) -> None:
        self.done += 1
        os.kill(node.pid, signal.SIGKILL)

    def stop(self, node: NodeRecord) -> None:
        self.done += 1
        os.kill(node.pid, signal.SIGSTOP)
        self.undo.append(lambda: self.resume(node))

    @staticmethod
    def resume(node: NodeRecord) -> None:
        with contextlib.suppress(ProcessLookupError):  # Serve may have replaced it
            os.kill(node.pid, signal.SIGCONT)

    def cut(self, node: NodeRecord) -> None:
        self.done += 1
        self.nodes.act(node, lambda proxy: proxy.hold())
        self.undo.append(lambda: self.nodes.act(node, lambda proxy: proxy.heal()))

    def heal(self) -> None:
        while self.undo:
            self.undo.pop()()

    def wait_until_whole_and_at_rest(self) -> None:
        def whole(status: dict[str, Any]) -> bool:
            healthy = [node["role"] for node in status["nodes"] if node["healthy"]]
            return healthy.count("prefill") == healthy.count("decode") == 2

        self.cluster.wait_until(whole, REPLACED_S)
        self.cluster.wait_until_at_rest()


@pytest.fixture(scope="module")
def rig(pronghorn: CommandLine) -> Iterator[Rig]:
    # Apart always: a decode node that is idle would sooner compute these prompts itself.
    pools = ("--prefill=2", "--decode=2", "--disaggregation=always")
    options = (*pools, "--kv-memory=192MiB", "--drain-timeout=10", "--threads=1")
    with proxied_nodes(pronghorn, NAME) as nodes:
        started = start(pronghorn, NAME, f"--advertise-host={ADVERTISED}", *options)
        try:
            yield Rig(started, nodes)
            started.assert_ledger_clean()
        finally:
            end(started)


@pytest.fixture(autouse=True)
def whole(rig: Rig) -> Iterator[None]:
    rig.wait_until_whole_and_at_rest()
    yield
    rig.heal()
    rig.wait_until_whole_and_at_rest()


@pytest.fixture(scope="module")
def undisturbed(rig: Rig) -> dict[int, list[str]]:
    """The texts by length of the prompts; twice the same, or there would be nothing to compare with."""
    texts = {}
    for length in (PROMPT_TOKENS, LONG_PROMPT_TOKENS):
        streams = RecordedStreams(rig.cluster.url, length, NEW_TOKENS)
        texts[length] = streams.run()
        assert streams.run() == texts[length]
    return texts


FAULTS = {"killed": Rig.kill, "stopped": Rig.stop, "cut off": Rig.cut}
Fault = Callable[[Rig, NodeRecord], None]
faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@faults
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(STREAMS, id="first tokens", marks=pytest.mark.chaos),
        pytest.param(STREAMS * NEW_TOKENS // 2, id="half"),
    ],
)
def test_decode_fails_in_mid_stream(rig: Rig, undisturbed: dict[int, list[str]], fault: Fault, at: int) -> None:
    before = rig.done

    def on_token(count: int) -> None:
        if count == at:
            fault(rig, rig.busiest("decode"))

    assert RecordedStreams(rig.cluster.url, PROMPT_TOKENS, NEW_TOKENS).run(on_token) == undisturbed[PROMPT_TOKENS]
    assert rig.done == before + 1


@pytest.mark.chaos
@faults
def test_prefill_fails_before_anything_was_asked_of_it(
    rig: Rig, undisturbed: dict[int, list[str]], fault: Fault
) -> None:
    fault(rig, rig.busiest("prefill"))
    streams = RecordedStreams(rig.cluster.url, LONG_PROMPT_TOKENS, NEW_TOKENS)
    assert streams.run() == undisturbed[LONG_PROMPT_TOKENS]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Rig.kill, id="killed"),
        pytest.param(Rig.stop, id="stopped", marks=pytest.mark.chaos),
        pytest.param(Rig.cut, id="cut off", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize(
    "way, after_bytes",
    [
        pytest.param(UP, 2_000, id="computing", marks=pytest.mark.chaos),
        pytest.param(DOWN, 5_000_000, id="sending"),
    ],
)
def test_prefill_fails_in_a_hand_over(
    rig: Rig, undisturbed: dict[int, list[str]], fault: Fault, way: str, after_bytes: int
) -> None:
    """When it has been asked, or in the middle of its blocks, of which a prompt has nine megabytes. Which of the two:
    the first that comes to it, since what failed lately may be asked for nothing."""
    before = rig.done

    def strike(node: NodeRecord) -> None:
        if rig.done == before:
            fault(rig, node)

    for node in [node for node in rig.nodes.records().values() if node.role == "prefill"]:
        rig.nodes.act(node, lambda proxy, node=node: proxy.after(after_bytes, way, lambda: strike(node)))  # type: ignore[misc]  # of this turn
    streams = RecordedStreams(rig.cluster.url, LONG_PROMPT_TOKENS, NEW_TOKENS)
    assert streams.run() == undisturbed[LONG_PROMPT_TOKENS]
    assert rig.done == before + 1


@pytest.mark.chaos
@faults
def test_prefill_fails_when_all_is_handed_over(rig: Rig, undisturbed: dict[int, list[str]], fault: Fault) -> None:
    def on_token(count: int) -> None:
        if count == STREAMS * NEW_TOKENS // 2:
            fault(rig, rig.busiest("prefill"))

    streams = RecordedStreams(rig.cluster.url, LONG_PROMPT_TOKENS, NEW_TOKENS)
    assert streams.run(on_token) == undisturbed[LONG_PROMPT_TOKENS]
