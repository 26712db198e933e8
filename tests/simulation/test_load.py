"""The load model: what goes in comes out, and what the router gets is the least loaded."""

from pathlib import Path
from random import Random

import pytest

from cluster.simulator.load_model import ByLoad, LoadModel, LoadNode, LoadResult, NodeTiming
from cluster.simulator.load_report import make_router
from cluster.simulator.trace import TraceRequest, make_up, read
from orchestrator.admission import Admission, Limits
from orchestrator.holdings import Holdings
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError

TIMING = NodeTiming(prefill_tokens_per_s=1000.0, hop_s=0.0, link_bytes_per_s=1e12)


def model(prefill: int = 1, decode: int = 1, slots: int = 100, queue: int = 100) -> LoadModel:
    holdings = Holdings(1 << 24, Counters())
    return LoadModel(
        prefill, decode, make_router("kv_aware", holdings, TIMING, 0), holdings, Admission(Limits(slots, queue)), TIMING
    )


def test_one_request_takes_what_its_phases_take() -> None:
    result = model().run([TraceRequest(5.0, 2000, 11, ())])
    assert result.ttft_s == [pytest.approx(2.0)]
    assert result.inter_token_s == [pytest.approx(TIMING.decode_step_s + TIMING.decode_sequence_s)]
    assert result.virtual_s == pytest.approx(7.0 + 10 * result.inter_token_s[0])


@pytest.mark.field("dynamo#4425")
def test_fifty_at_once_on_two_nodes_tell_what_their_first_tokens_waited_for_and_use_both_nodes() -> None:
    """dynamo#4425: 6.5 s to a first token with 50 at once on a prefill and a decode node."""
    fifty = [TraceRequest(0.001 * i, 1000, 20, ()) for i in range(50)]
    timing = NodeTiming()

    def run(prefill: int, policy: str) -> LoadResult:
        holdings = Holdings(1 << 24, Counters())
        router = make_router(policy, holdings, timing, 0)
        return LoadModel(prefill, 2 - prefill, router, holdings, Admission(Limits(40, 100)), timing).run(fifty)

    apart = run(1, "kv_aware")
    parts = apart.parts
    assert len(parts.transfer_s) == 50 and max(parts.queued_s) > 0.0 < max(parts.waited_s)
    for ttft_s, *told_s in zip(apart.ttft_s, parts.queued_s, parts.waited_s, parts.computed_s, strict=True):
        assert ttft_s == pytest.approx(sum(told_s) + 3 * timing.hop_s)
    assert 0 < apart.in_place < 50, "what would wait too long is computed on the decode node"
    assert max(apart.ttft_s) < max(run(1, "round_robin").ttft_s)
    assert max(apart.ttft_s) < 1.3 * max(run(0, "kv_aware").ttft_s)


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    same = [TraceRequest(0.0, 1100, 1, (1, 2)), TraceRequest(10.0, 1100, 1, (1, 2))]
    result = model().run(same)
    assert result.ttft_s == [pytest.approx(1.1), pytest.approx(1.1 - 1.024)]
    assert result.reused_tokens == 1024


def test_what_finds_no_room_is_shed_and_what_waits_is_served() -> None:
    result = model(slots=1, queue=1).run([TraceRequest(0.0, 1000, 1, ())] * 3)
    assert (len(result.ttft_s), result.shed) == (2, 1)
    assert result.ttft_s == [pytest.approx(1.0), pytest.approx(2.0)]


def test_the_shortlist_is_the_least_loaded_whatever_moved() -> None:
    random = Random(1)
    nodes = [LoadNode(f"decode-{i}", "decode") for i in range(20)]
    by_load = ByLoad(nodes)
    for _ in range(2000):
        node = random.choice(nodes)
        by_load.move(node, 1 if node.load == 0 or random.random() < 0.5 else -1)
        loads = [node.load for node in by_load.least(4)]
        assert loads == sorted(n.load for n in nodes)[:4]


def test_a_made_up_load_goes_through_and_replays() -> None:
    def run() -> tuple[list[float], int]:
        result = model(4, 4, 64, 1000).run(make_up(Random(3), 2000, 2.0))
        return result.ttft_s, result.reused_tokens

    first = run()
    assert len(first[0]) == 2000 and first[1] > 0
    assert run() == first


def test_a_trace_is_read_and_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 20, "hash_ids": [4, 5]}\n'
    path.write_text(line)
    assert list(read(path)) == [TraceRequest(1.5, 700, 20, (4, 5))]
    path.write_text(line + "{}\n")
    with pytest.raises(ConfigurationError, match="trace.jsonl:2"):
        list(read(path))
