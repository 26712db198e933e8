"""Each fault that the simulator can do, at each phase of one request, while others wait in the queue behind it.

One request is in flight at a time, so that the nth message of a kind marks a phase of just that request: 96 tokens
are computed in eight chunks, whose blocks leave in eight frames, and twelve tokens come back. What must hold is the
simulator's own (`cluster/simulator/invariants.py`); here every fault is seen to have been done as well.
"""

import pytest

from cluster.simulator.canary import VOCAB_SIZE
from cluster.simulator.plan import RECEIVER, SENDER, Fault, FaultKind, NodePlan, RequestPlan
from tests.fakes.simulated_cluster import ORCHESTRATOR, holds, node, plan, request

P, D = "prefill-0", "decode-0"
OTHER = "orchestrator-1"

PHASES: dict[str, tuple[str, int, float]] = {
    "routed": ("submit", 1, 0.0),
    "computing": ("blocks", 4, 0.001),
    "computed": ("first_token", 1, 0.0),
    "first-block": ("blocks", 1, 0.0),
    "half-of-blocks": ("blocks", 4, 0.0),
    "last-block": ("blocks", 8, 0.0),
    "admitted": ("commit", 1, 0.003),
    "token-1": ("outputs", 1, 0.0),
    "token-k": ("outputs", 6, 0.0),
    "last-token": ("outputs", 12, 0.0),
}
"""Which message, which of them, and how long after it was sent."""

FAULTS: dict[str, list[Fault]] = {
    "prefill-killed": [Fault(FaultKind.KILL, 0.0, P)],
    "decode-killed": [Fault(FaultKind.KILL, 0.0, D)],
    "prefill-stopped": [Fault(FaultKind.PAUSE, 0.0, P, duration_s=5.0)],
    "decode-stopped": [Fault(FaultKind.PAUSE, 0.0, D, duration_s=5.0)],
    "prefill-drained": [Fault(FaultKind.DRAIN, 0.0, P, duration_s=0.5)],
    "decode-drained": [Fault(FaultKind.DRAIN, 0.0, D, duration_s=0.5)],
    "machine-lost": [Fault(FaultKind.KILL, 0.0, P), Fault(FaultKind.KILL, 0.0, D)],
    "cut-one-way": [Fault(FaultKind.CUT, 0.0, P, D, duration_s=4.0)],
    "cut-both-ways": [Fault(FaultKind.CUT_BOTH, 0.0, P, D, duration_s=4.0)],
    "slow": [Fault(FaultKind.SLOW, 0.0, P, D, duration_s=3.0, detail="50")],
    "reset": [Fault(FaultKind.BREAK, 0.0, P, D)],
    "redis-away": [Fault(FaultKind.REDIS_AWAY, 0.0, duration_s=6.0)],
    "redis-flushed": [Fault(FaultKind.REDIS_FLUSHED, 0.0)],
    "orchestrator-killed": [Fault(FaultKind.KILL, 0.0, OTHER)],
    "engine-killed": [Fault(FaultKind.KILL_ENGINE, 0.0, D)],
    "restarted": [Fault(FaultKind.KILL, 0.0, D, duration_s=0.3, detail="same")],
    "churn": [Fault(FaultKind.JOIN, 0.0, D), Fault(FaultKind.KILL, 0.0, P, duration_s=0.3, detail="new")],
    "two-at-once": [Fault(FaultKind.KILL, 0.0, D), Fault(FaultKind.REDIS_AWAY, 0.0, duration_s=3.0)],
}


def played(faults: list[Fault], phase: str) -> list[Fault]:
    moment, nth, delay_s = PHASES[phase]
    return [Fault(f.kind, 0.0, f.target, f.other, moment, delay_s, f.duration_s, f.detail, nth) for f in faults]


def nodes() -> list[NodePlan]:
    return [node(name, num_blocks=96) for name in (P, D, "decode-1")]


def requests() -> list[RequestPlan]:
    prompts = [[(i + j) % VOCAB_SIZE for j in range(96)] for i in range(3)]
    return [request(i, at_s=0.05, prompt=prompt, new_tokens=12) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_one_of_the_first_request(phase: str) -> None:
    seen = Fault(FaultKind.DROP_CACHES, 0.0, SENDER, RECEIVER)
    verdict = holds(plan(played([seen], phase), requests(), nodes(), max_in_flight=1))
    (fired,) = [i for i, line in enumerate(verdict.story) if "FAULT" in line]
    (ended,) = [i for i, line in enumerate(verdict.story) if "request-0 finished" in line]
    ends = {"submit": (ORCHESTRATOR, D), "outputs": (D, ORCHESTRATOR)}.get(PHASES[phase][0], (P, D))
    assert fired < ended and f"{ends[0]} -> {ends[1]}" in verdict.story[fired]


@pytest.mark.cells(
    "F1 P1-P11", "F2 P1-P11", "F3 P1-P11", "F4 P1-P11", "F5 P1-P11", "F6 P1-P11", "F7 P1-P11", "F8 P1-P11"
)
@pytest.mark.cells("F11 P1-P11", "F12 P1-P11", "F15 P1-P11", "F17 P1-P11", "F18 P1-P11", "F20 P1-P11")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", FAULTS)
def test_the_request_in_that_phase_and_those_behind_it_end_right(name: str, phase: str) -> None:
    holds(
        plan(
            played(FAULTS[name], phase),
            requests(),
            nodes(),
            max_in_flight=1,
            orchestrators=[ORCHESTRATOR, OTHER],
        )
    )
