"""Plans for the simulator that a test writes itself: a plain cluster, plain requests, and the faults of the test."""

from collections.abc import Sequence

import msgspec

from cluster.simulator.canary import VOCAB_SIZE
from cluster.simulator.plan import Fault, NodePlan, Plan, RequestPlan
from cluster.simulator.simulation import Verdict, run

ORCHESTRATOR = "orchestrator-0"


def node(name: str, **changes: object) -> NodePlan:
    """`role-number`; blocks for three of the longest requests."""
    plain = NodePlan(
        name=name,
        role="prefill" if name.startswith("prefill") else "decode",
        num_blocks=32,
        max_batch_size=4,
        max_waiting=128,
        max_in_flight=128,
        step_s=0.01,
        token_s=0.0005,
        clock_offset_s=0.0,
        clock_rate=1.0,
        stall_timeout_s=1.0,
    )
    return msgspec.structs.replace(plain, **changes)


def request(number: int, **changes: object) -> RequestPlan:
    """Sent every 50 ms; half of the prompt is the same for all."""
    plain = RequestPlan(
        name=f"request-{number}",
        at_s=0.05 * number,
        orchestrator=ORCHESTRATOR,
        prompt=[*range(12), *((100 + number + i) % VOCAB_SIZE for i in range(12))],
        new_tokens=10,
        budget_s=15.0,
    )
    return msgspec.structs.replace(plain, **changes)


def plan(
    faults: Sequence[Fault] = (),
    requests: Sequence[RequestPlan] | None = None,
    nodes: Sequence[NodePlan] | None = None,
    **changes: object,
) -> Plan:
    """Two nodes of each role, one orchestrator and eight requests, where the test says nothing else."""
    plain = Plan(
        seed=0,
        nodes=list(nodes or map(node, ("prefill-0", "prefill-1", "decode-0", "decode-1"))),
        orchestrators=[ORCHESTRATOR],
        requests=list(requests) if requests is not None else [request(i) for i in range(8)],
        faults=list(faults),
        max_in_flight=1000,
        max_queue=1000,
        max_attempts=3,
        link_delay_s=0.002,
        link_jitter_s=0.001,
        link_bytes_per_s=1e6,
        window_bytes=512,
        reconnect_min_s=0.1,
        late_frames=True,
        perturbed=True,
        prefix_caching=True,
    )
    return msgspec.structs.replace(plain, **changes)


def holds(tried: Plan) -> Verdict:
    """Run it, and see that nothing was violated and that every fault of the plan was done."""
    verdict = run(tried)
    assert verdict.ok, "\n".join([*verdict.violations, *tried.describe(), *verdict.story])
    assert sum(verdict.faults_fired.values()) == len(tried.faults), f"only {verdict.faults_fired} were done"
    return verdict
