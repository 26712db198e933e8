"""What the simulator is there for: many seeds without a violation, and that it would notice."""

from pathlib import Path

import msgspec
import pytest

from cluster.simulator.fault_report import smallest
from cluster.simulator.plan import Plan
from cluster.simulator.planted import PlantedBug, planted
from cluster.simulator.scenario import plan_of
from cluster.simulator.simulation import Verdict, run

SEEDS = 500
BATCH = 50
FIND_WITHIN_SEEDS = 1000
PLANS = sorted((Path(__file__).parent / "plans").glob("*.json"))


def told(verdict: Verdict) -> str:
    return "\n".join([*verdict.violations, *verdict.plan.describe(), *verdict.story])


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_nothing_is_lost_whatever_the_seed_does(first: int) -> None:
    for seed in range(first, first + BATCH):
        verdict = run(plan_of(seed))
        assert verdict.ok, told(verdict)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_what_once_broke_holds_now(path: Path) -> None:
    verdict = run(msgspec.json.decode(path.read_bytes(), type=Plan))
    assert verdict.ok, told(verdict)


@pytest.mark.parametrize("bug", PlantedBug, ids=lambda bug: bug.name.lower())
def test_a_planted_bug_is_found_and_shrunk(bug: PlantedBug) -> None:
    with planted(bug):
        verdict = next(
            (v for seed in range(FIND_WITHIN_SEEDS) if not (v := run(plan_of(seed))).ok),
            None,
        )
        assert verdict is not None, f"{bug} was not found in {FIND_WITHIN_SEEDS} seeds"
        small = smallest(verdict)
        assert not small.ok
        assert len(small.plan.requests) <= len(verdict.plan.requests)
        assert len(small.plan.faults) <= len(verdict.plan.faults)
    assert run(small.plan).ok, "the plan breaks without the bug, too"
