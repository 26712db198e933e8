"""A failing plan made smaller while it still fails: fewer faults, requests, nodes and orchestrators, and plainer ones.

Knows plans and a judge. Invariant: what is returned fails, in the judge's eyes, as the plan given did.
"""

from collections.abc import Callable, Iterator

import msgspec

from cluster.simulator.plan import Plan

MAX_RUNS = 300


def shrink(plan: Plan, fails: Callable[[Plan], bool], max_runs: int = MAX_RUNS) -> Plan:
    """The smallest plan found in at most `max_runs` simulations."""
    runs = 0
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in _smaller(plan):
            if runs >= max_runs:
                return plan
            runs += 1
            if fails(candidate):
                plan, shrunk = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Large steps first."""
    for name in ("faults", "requests"):
        items = getattr(plan, name)
        size = len(items) // 2
        while size >= 1:
            for start in range(0, len(items), size):
                yield msgspec.structs.replace(plan, **{name: items[:start] + items[start + size :]})
            size //= 2
    for node in plan.nodes:
        if len(plan.nodes) > 1:
            yield msgspec.structs.replace(plan, nodes=[n for n in plan.nodes if n is not node])
    if len(plan.orchestrators) > 1:
        yield _with_one_orchestrator(plan)
    yield from _plainer(plan)


def _with_one_orchestrator(plan: Plan) -> Plan:
    only = plan.orchestrators[0]
    requests = [msgspec.structs.replace(r, orchestrator=only) for r in plan.requests]
    return msgspec.structs.replace(plan, orchestrators=[only], requests=requests)


def _plainer(plan: Plan) -> Iterator[Plan]:
    for index, request in enumerate(plan.requests):
        plain = msgspec.structs.replace(
            request, cancel_after_s=None, stop_after_tokens=None, read_delay_s=0.0, target_endpoint=None, eos=None
        )
        if plain != request:
            yield msgspec.structs.replace(plan, requests=[*plan.requests[:index], plain, *plan.requests[index + 1 :]])
    if plan.perturbed:
        yield msgspec.structs.replace(plan, perturbed=False)
    if plan.late_frames:
        yield msgspec.structs.replace(plan, late_frames=False)
