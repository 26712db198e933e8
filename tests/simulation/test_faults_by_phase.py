"""Each fault at each phase of a request, on either side of the message that marks the phase.

What must hold is the simulator's: every request ends once, in time, with the right tokens or an excused error, and
everybody is at rest afterwards. Here it is seen, beyond that, that the fault was done.
"""

import pytest

from cluster.simulator.plan import RECEIVER, SENDER, Fault, FaultKind
from tests.fakes.simulated_cluster import holds, plan, request

PHASES = ("submit", "ask", "first_token", "blocks", "commit", "outputs")
LASTING = {
    FaultKind.KILL: 1.0,
    FaultKind.PAUSE: 5.0,
    FaultKind.PAUSE_SHELL: 2.5,
    FaultKind.PAUSE_ENGINE: 1.0,
}
ON_LINKS = {
    FaultKind.CUT: 4.0,
    FaultKind.CUT_BOTH: 1.0,
    FaultKind.SLOW: 3.0,
    FaultKind.BREAK: 0.0,
}


@pytest.mark.field("dynamo#13095")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", LASTING, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("side", [SENDER, RECEIVER])
def test_a_process_fails_at(phase: str, kind: FaultKind, side: str) -> None:
    holds(plan([Fault(kind, 0.1, side, moment=phase, delay_s=0.001, duration_s=LASTING[kind], detail="same")]))


@pytest.mark.field("sglang#36033")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ON_LINKS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("sides", [(SENDER, RECEIVER), (RECEIVER, SENDER)], ids=["along", "against"])
def test_a_link_fails_at(phase: str, kind: FaultKind, sides: tuple[str, str]) -> None:
    holds(plan([Fault(kind, 0.1, *sides, moment=phase, delay_s=0.001, duration_s=ON_LINKS[kind], detail="50")]))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_leaves_in_good_order_at(phase: str, role: str) -> None:
    verdict = holds(plan([Fault(FaultKind.DRAIN, 0.1, f"{role}-0", moment=phase, duration_s=0.5)]))
    assert verdict.endings == {"finished": 8 + 1}, "a drain fails no request"


@pytest.mark.cells("F9 P5-P7")
@pytest.mark.parametrize("damage", ["corrupt", "duplicate", "truncate", "drop"])
def test_a_damaged_block_is_never_used(damage: str) -> None:
    verdict = holds(plan([Fault(FaultKind.TAMPER, 0.1, duration_s=3.0, detail=damage)] * 3))
    assert verdict.endings == {"finished": 8 + 1}


@pytest.mark.cells("F16 P1-P11")
@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3])
def test_a_client_leaves_wherever_its_request_is(delay_s: float) -> None:
    requests = [request(i, cancel_after_s=delay_s + 0.003 * i) for i in range(20)]
    holds(plan(requests=requests))


@pytest.mark.cells("F19 P1-P11")
def test_under_four_times_the_load_what_is_taken_ends_right_and_the_rest_is_refused() -> None:
    """From 0.3 s to 1.5 s, so that requests pass every phase while it begins, lasts and ends."""
    calm = [request(i, at_s=0.03 * i) for i in range(10)]
    over = [request(100 + i, at_s=0.3 + 0.004 * i) for i in range(300)]
    after = [request(1000 + i, at_s=3.0 + 0.05 * i) for i in range(10)]
    verdict = holds(plan(requests=[*calm, *over, *after], max_in_flight=16, max_queue=16))
    assert verdict.endings["failed"] >= 150, "it was no overload"
    assert verdict.endings["finished"] >= 80
    ends = {name: record.outcome for name, record in verdict.records.items()}
    assert {ends[each.name] for each in (*calm, *after)} == {"finished"}
