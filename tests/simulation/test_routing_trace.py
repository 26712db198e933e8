"""The router on traces: never worse than a blind one by more than it may be, and apart never worse than together."""

import pytest

from bench.routing_trace import P_D_LEAST, TRACES, WORSE, capacity, play
from cluster.simulator.load_model import LoadResult

REQUESTS = 500


def percentile(result: LoadResult, share: float) -> float:
    ordered = sorted(result.ttft_s)
    return ordered[int(share * (len(ordered) - 1))]


@pytest.mark.field("production-stack#884", "production-stack#1035")
@pytest.mark.parametrize("share", [0.6, 1.2, 3.0])
@pytest.mark.parametrize("name", TRACES)
def test_kv_aware_is_never_worse_than_a_blind_policy(name: str, share: float) -> None:
    trace = TRACES[name]
    rate = share * capacity(trace, 4, 0)
    ours = play(trace, "kv_aware", 4, 4, rate, REQUESTS, 0)
    for blind in ("least_request", "round_robin"):
        theirs = play(trace, blind, 4, 4, rate, REQUESTS, 0)
        assert percentile(ours, 0.5) <= WORSE * percentile(theirs, 0.5)
        assert percentile(ours, 0.99) <= WORSE * percentile(theirs, 0.99)
        if name == "multi-turn":
            assert ours.reused_tokens > theirs.reused_tokens


@pytest.mark.field("dynamo#3774", "dynamo#2552", "dynamo#825")
@pytest.mark.parametrize("share", [0.6, 1.2])
@pytest.mark.parametrize("name", TRACES)
def test_apart_is_as_good_as_together_on_the_same_nodes(name: str, share: float) -> None:
    trace = TRACES[name]
    rate = share * capacity(trace, 4, 0)
    apart = play(trace, "kv_aware", 4, 4, rate, REQUESTS, 0)
    together = play(trace, "kv_aware", 0, 8, rate, REQUESTS, 0)
    assert apart.good >= P_D_LEAST * together.good
