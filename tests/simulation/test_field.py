"""What users of other systems have suffered, played on the simulated cluster. The issue is named with each."""

import pytest

from cluster.simulator.plan import Fault, FaultKind
from tests.fakes.simulated_cluster import holds, node, plan, request

LONG_STREAMS = [request(i, new_tokens=60) for i in range(8)]
LONG_NODES = [node(name, num_blocks=256) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
SLOW_NODES = [node("prefill-0"), node("decode-0", num_blocks=128, step_s=0.1)]


@pytest.mark.field("sglang#28651")
def test_a_storm_of_cancels_leaves_no_slot_taken_and_the_next_requests_succeed() -> None:
    """sglang#28651: cancel nine of ten prefills at once."""
    storm = [request(i, at_s=0.001 * i, cancel_after_s=0.3 - 0.001 * i) for i in range(90)]
    others = [request(100 + i, at_s=0.3 + 0.01 * i) for i in range(10)]
    verdict = holds(plan(requests=[*storm, *others]))
    assert verdict.endings["finished"] >= 10 + 1


@pytest.mark.field("vllm#46289", "dynamo#7489")
def test_aborts_on_both_sides_at_random_points_leak_no_block() -> None:
    """vllm#46289, dynamo#7489: abort during the hand-over, again and again."""
    requests = [request(i, at_s=0.01 * i, cancel_after_s=0.001 + (0.0137 * i) % 0.15) for i in range(1000)]
    holds(plan(requests=requests))


@pytest.mark.field("vllm#29906")
def test_deadlines_around_the_end_of_the_prefill_keep_no_block() -> None:
    """vllm#29906: timeouts at the end of a prefill kept blocks for minutes."""
    requests = [request(i, at_s=0.02 * i, budget_s=0.02 + 0.002 * (i % 40)) for i in range(200)]
    holds(plan(requests=requests))


@pytest.mark.field("dynamo#13691")
def test_a_cancelled_request_is_let_go_of_within_a_second() -> None:
    """dynamo#13691: a request went on for as long as it would have run. Here that were eight seconds."""
    verdict = holds(plan(requests=[request(i, new_tokens=80, cancel_after_s=0.4) for i in range(4)], nodes=SLOW_NODES))
    assert verdict.endings["cancelled"] == 4
    assert verdict.rest_took_s <= 1.0


@pytest.mark.field("dynamo#11068")
def test_what_nobody_reads_any_more_is_let_go_of_within_a_second_of_the_break() -> None:
    """The connection to the orchestrator breaks in mid-stream: its sequences end with it."""
    broken = Fault(FaultKind.BREAK, 0.5, "decode-0", "orchestrator-0")
    requests = [request(i, new_tokens=80) for i in range(4)]
    verdict = holds(plan([broken], requests, SLOW_NODES, max_attempts=1))
    assert verdict.endings == {"finished": 4 + 1}, "they go on when the session is opened again"
    assert verdict.rest_took_s <= 1.0


@pytest.mark.field("TensorRT-LLM#12313")
def test_a_pool_full_of_dead_requests_empties_without_a_new_one() -> None:
    """TensorRT-LLM#12313: clean-up ran only when another request came."""
    stuck = Fault(FaultKind.PAUSE, 0.05, "prefill-0", duration_s=5.0)
    nodes = [node("prefill-0"), node("decode-0", num_blocks=12, stall_timeout_s=3.0)]
    holds(plan([stuck], [request(i, at_s=0.0, budget_s=1.0) for i in range(12)], nodes))


@pytest.mark.field("vllm#49238")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_killed_again_and_again_comes_back_each_time(role: str) -> None:
    """vllm#49238: a stale endpoint after a restart under the same name."""
    kills = [Fault(FaultKind.KILL, 0.5 * i, f"{role}-0", duration_s=0.2, detail="same") for i in range(20)]
    requests = [request(i, at_s=0.1 * i) for i in range(110)]
    verdict = holds(plan(kills, requests))
    if role == "prefill":
        assert verdict.endings == {"finished": 111}


@pytest.mark.field("sglang#12779")
def test_without_a_prefill_node_decode_serves_alone() -> None:
    """sglang#12779: the death of prefill took decode with it."""
    kills = [Fault(FaultKind.KILL, 0.1, f"prefill-{i}") for i in range(2)]
    verdict = holds(plan(kills))
    assert verdict.endings == {"finished": 8 + 1}


@pytest.mark.field("dynamo#11068")
@pytest.mark.parametrize("detail", ["", "flushed"])
def test_redis_away_for_longer_than_a_lease_fails_no_request(detail: str) -> None:
    """dynamo#11068: the loss of the store left zombies; here serving goes on from the sessions."""
    away = Fault(FaultKind.REDIS_AWAY, 0.1, duration_s=6.0, detail=detail)
    verdict = holds(plan([away], [request(i, at_s=0.2 * i) for i in range(40)]))
    assert verdict.endings == {"finished": 40 + 1}


@pytest.mark.field("dynamo#13088")
def test_hundreds_of_nodes_that_come_and_go_in_seconds_leave_every_request_with_an_end() -> None:
    """dynamo#13088: of 1,536 requests 24 hung after selection while 250 workers came and 150 went in 12 minutes."""
    roles = ("prefill", "decode")
    joins = [Fault(FaultKind.JOIN, 0.08 * i, f"{roles[i % 2]}-0") for i in range(250)]
    leaves = [
        Fault((FaultKind.KILL, FaultKind.DRAIN)[i // 2 % 2], 0.13 * i + 1.0, f"{roles[i % 2]}-0+{i // 2 + 1}")
        for i in range(150)
    ]
    holds(plan([*joins, *leaves], [request(i, at_s=0.0135 * i) for i in range(1500)]))


@pytest.mark.field("dynamo#13088")
def test_nodes_that_come_and_go_leave_every_request_with_an_end() -> None:
    """dynamo#13088: requests hung after selection while workers came and went."""
    churn = [
        fault
        for i in range(8)
        for fault in (
            Fault(FaultKind.JOIN, 0.7 * i, f"{('prefill', 'decode')[i % 2]}-1"),
            Fault(FaultKind.KILL, 0.7 * i + 0.35, f"{('prefill', 'decode')[i % 2]}-0", duration_s=0.3, detail="same"),
        )
    ]
    holds(plan(churn, [request(i, at_s=0.06 * i) for i in range(100)]))


@pytest.mark.field("Mooncake#3688")
def test_nodes_that_join_and_leave_cost_no_request_a_third_of_its_time() -> None:
    """Mooncake#3688: a new, empty node drew all writes, and one that stopped cost others ten seconds."""
    most_s = 0.15
    churn = [
        *(Fault(FaultKind.JOIN, 3.5 + 0.1 * i, name) for i, name in enumerate(("prefill-0", "decode-0"))),
        *(Fault(FaultKind.DRAIN, 4.5 + 0.1 * i, name) for i, name in enumerate(("prefill-1", "decode-1"))),
    ]

    def finished(budget_s: float, faults: list[Fault]) -> int:
        requests = [request(i, at_s=3.0 + 0.05 * i, budget_s=budget_s) for i in range(60)]
        return holds(plan(faults, requests)).endings["finished"]

    assert finished(0.8 * most_s, []) < 60 + 1, "the bound says something"
    assert finished(most_s, []) == 60 + 1
    assert finished(1.3 * most_s, churn) == 60 + 1


@pytest.mark.cells("F14 P1-P11")
def test_clocks_that_differ_by_minutes_and_drift_change_nothing() -> None:
    """Leases and deadlines hold on each process's own clock."""
    offsets = {"prefill-0": 300.0, "prefill-1": -300.0, "decode-0": -300.0, "decode-1": 300.0}
    nodes = [node(name, clock_offset_s=s, clock_rate=1.0 + s / 100_000) for name, s in offsets.items()]
    verdict = holds(plan(nodes=nodes, requests=[request(i, at_s=0.2 * i) for i in range(40)]))
    assert verdict.endings == {"finished": 40 + 1}


@pytest.mark.field("production-stack#749")
def test_a_black_hole_holds_up_nobody_else() -> None:
    """production-stack#749: one dead back end blocked requests to the healthy ones."""
    hole = Fault(FaultKind.CUT_BOTH, 0.0, "decode-0", "orchestrator-0", duration_s=8.0)
    requests = [request(i, at_s=4.0 + 0.05 * i, budget_s=2.0) for i in range(20)]
    verdict = holds(plan([hole], requests))
    assert verdict.endings == {"finished": 20 + 1}


@pytest.mark.field("gpustack#5939", "tinfoilsh#469")
@pytest.mark.parametrize("at_s", [0.3, 0.5, 0.7])
@pytest.mark.parametrize(
    ("kind", "lasting_s"),
    [
        (FaultKind.KILL, 1.0),
        (FaultKind.KILL_ENGINE, 0.0),
        (FaultKind.PAUSE, 5.0),
        (FaultKind.PAUSE_SHELL, 5.0),
        (FaultKind.PAUSE_ENGINE, 5.0),
        (FaultKind.DRAIN, 1.0),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, FaultKind) else "",
)
def test_streams_outlive_their_decode_node(kind: FaultKind, lasting_s: float, at_s: float) -> None:
    """gpustack#5939, tinfoilsh#469: a break in mid-stream ended the answer, or looked like its end."""
    fault = Fault(kind, at_s, "decode-0", duration_s=lasting_s, detail="same")
    verdict = holds(plan([fault], LONG_STREAMS, LONG_NODES))
    assert verdict.endings == {"finished": 8 + 1}


@pytest.mark.field("dynamo#13095")
@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.CUT_BOTH, FaultKind.BREAK], ids=lambda kind: kind.name)
@pytest.mark.parametrize("ends", [("decode-0", "orchestrator-0"), ("orchestrator-0", "decode-0")])
def test_streams_outlive_the_link_to_their_decode_node(kind: FaultKind, ends: tuple[str, str]) -> None:
    """dynamo#13095: a node that was silent behind an open connection held its clients up."""
    lasting_s = 0.0 if kind is FaultKind.BREAK else 6.0
    verdict = holds(plan([Fault(kind, 0.5, *ends, duration_s=lasting_s)], LONG_STREAMS, LONG_NODES))
    assert verdict.endings == {"finished": 8 + 1}


def test_streams_wait_for_the_only_decode_node_to_come_back() -> None:
    """All decode nodes are killed in mid-stream: the orchestrator needs no restart, nor do its clients."""
    killed = Fault(FaultKind.KILL, 0.5, "decode-0", duration_s=2.0, detail="new")
    verdict = holds(plan([killed], LONG_STREAMS[:4], LONG_NODES[:3]))
    assert verdict.endings == {"finished": 4 + 1}


def test_an_orchestrator_that_was_stopped_for_long_refuses_nobody_when_it_goes_on() -> None:
    """Every node has been silent for longer than any bound, as it seems to it."""
    stopped = Fault(FaultKind.PAUSE, 0.5, "orchestrator-0", duration_s=5.0)
    later = [request(100 + i, at_s=0.6 + 0.01 * i) for i in range(8)]
    verdict = holds(plan([stopped], [*LONG_STREAMS, *later], LONG_NODES))
    assert verdict.endings == {"finished": 8 + 8 + 1}


@pytest.mark.parametrize("kills", [2, 4])
def test_a_stream_that_gets_on_between_the_deaths_of_its_nodes_is_no_poison(kills: int) -> None:
    deaths = [
        Fault(FaultKind.KILL, 0.4 + 0.6 * i, f"decode-{i % 2}", duration_s=0.3, detail="same") for i in range(kills)
    ]
    verdict = holds(plan(deaths, [request(i, new_tokens=150) for i in range(4)], LONG_NODES))
    assert verdict.endings == {"finished": 4 + 1}
