"""Many seeds in a row, and what they showed: the table that `pronghorn sim` prints, the story of seeds that failed."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from cluster.simulator.plan import Plan
from cluster.simulator.scenario import plan_of
from cluster.simulator.shrink import shrink
from cluster.simulator.simulation import Verdict, run

STORIES = 3
"""Failing seeds that are told and shrunk; the others are named."""


@dataclass
class Tally:
    seeds: int = 0
    failed: list[Verdict] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    late_frames: int = 0
    blocks_fetched: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.seeds += 1
        self.endings.update(verdict.endings)
        self.faults.update(verdict.faults_fired)
        self.late_frames += verdict.late_frames
        self.blocks_fetched += verdict.blocks_fetched
        self.virtual_s += verdict.virtual_s
        if not verdict.ok:
            self.failed.append(verdict)

    @property
    def violations(self) -> int:
        return sum(len(verdict.violations) for verdict in self.failed)


def simulate(seeds: Iterable[int], on_failure: Callable[[Verdict], None] = lambda _: None) -> Tally:
    began_s = time.perf_counter()
    tally = Tally()
    for seed in seeds:
        verdict = run(plan_of(seed))
        tally.add(verdict)
        if not verdict.ok:
            on_failure(verdict)
    tally.wall_s = time.perf_counter() - began_s
    return tally


def smallest(verdict: Verdict) -> Verdict:
    """The verdict on the smallest plan that breaks the same thing."""
    kinds = {_kind(violation) for violation in verdict.violations}

    def fails(plan: Plan) -> bool:
        return any(_kind(violation) in kinds for violation in run(plan).violations)

    return run(shrink(verdict.plan, fails))


def _kind(violation: str) -> str:
    """The violation without its names and numbers."""
    return "".join(c for c in violation if not c.isdigit())[:60]


def show(tally: Tally, out: Console) -> None:
    for verdict in tally.failed[:STORIES]:
        small = smallest(verdict)
        out.print(f"seed {verdict.plan.seed} fails; made smaller, this is left of it:", style="bold red")
        for line in [*small.plan.describe(), *small.story]:
            out.print(line, markup=False, highlight=False)
    table = Table(title=f"{tally.seeds} seeds, {tally.violations} violations")
    table.add_column("what")
    table.add_column("count", justify="right")
    for how, count in sorted(tally.endings.items()):
        table.add_row(f"requests {how}", str(count))
    for kind, count in sorted(tally.faults.items()):
        table.add_row(f"fault: {kind}", str(count))
    table.add_row("outputs that came late", str(tally.late_frames))
    table.add_row("blocks fetched from peers", str(tally.blocks_fetched))
    table.add_row("virtual time", f"{tally.virtual_s:.0f} s")
    table.add_row("wall time", f"{tally.wall_s:.1f} s")
    out.print(table)
    if tally.failed:
        out.print("failing seeds: " + ", ".join(str(verdict.plan.seed) for verdict in tally.failed))
