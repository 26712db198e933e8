"""What scenarios came to, as a table for people and as JSON for programs."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.chaos.growth import BOUNDS
from cluster.chaos.recorder import Request, Verdict
from cluster.chaos.runner import Outcome
from cluster.chaos.soak import Soaked

GROWTHS = 6
"""Of everything that may grow, of the processes in which it grew most."""


def show(outcomes: list[Outcome], out: Console) -> None:
    table = Table(box=None)
    table.add_column("scenario", no_wrap=True)
    for heading in (
        "fired",
        "requests",
        "again",
        "errors",
        "lost",
        "duplicated",
        "wrong",
        "leftovers",
        "recovered s",
        "gap s",
        "",
    ):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        if outcome.refused is None:
            table.add_row(*_cells(outcome))
    out.print(table, highlight=False)
    for outcome in outcomes:
        for failure in outcome.failures:
            out.print(f"{outcome.scenario}: {failure}", markup=False, highlight=False, soft_wrap=True)
        if outcome.refused is not None:
            out.print(f"{outcome.scenario} cannot run here: {outcome.refused}", markup=False, highlight=False)
    failed = sum(not outcome.ok for outcome in outcomes)
    ran = sum(outcome.refused is None for outcome in outcomes)
    seeds = ", ".join(sorted({str(outcome.seed) for outcome in outcomes}))
    out.print(f"{ran} scenarios, {failed} failed; seed {seeds}", highlight=False)


def _cells(outcome: Outcome) -> list[str]:
    recovered = "-" if outcome.recovered_s is None else f"{outcome.recovered_s:.1f}"
    return [
        outcome.scenario,
        f"{len(outcome.fired)}/{max(outcome.faults, len(outcome.fired))}",
        str(outcome.count),
        str(outcome.asked_again),
        str(outcome.total(Verdict.ERROR)),
        str(outcome.total(Verdict.LOST)),
        str(outcome.total(Verdict.DUPLICATED)),
        str(outcome.total(Verdict.WRONG)),
        str(len(outcome.leftovers)),
        recovered,
        f"{outcome.longest_gap_s:.1f}",
        "ok" if outcome.ok else "FAILED",
    ]


def show_soaked(soaked: Soaked, out: Console) -> None:
    table = Table("process", box=None)
    for heading in ("pid", "watched s", "last", "what", "a minute", "allowed"):
        table.add_column(heading, justify="right")
    for what in BOUNDS:
        for growth in [growth for growth in soaked.growths if growth.what == what][:GROWTHS]:
            numbers = (f"{growth.watched_s:.0f}", f"{growth.last:.0f}", what)
            rate = (f"{growth.per_minute:+.2f}", f"{growth.bound:.2f}")
            table.add_row(escape(growth.title), str(growth.pid), *numbers, *rate)
    out.print(table, highlight=False, markup=False)
    for failure in soaked.failures:
        out.print(failure, markup=False, highlight=False, soft_wrap=True)
    ended = ", ".join(f"{count} {verdict.value}" for verdict, count in sorted(soaked.requests.items()))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(f.kind for f in soaked.fired).items()))
    slowest_s = max(soaked.recovered_s, default=0.0)
    out.print(f"{soaked.minutes:.1f} minutes, {len(soaked.fired)} faults ({kinds})", highlight=False)
    errors = f" ({', '.join(f'{n} {code}' for code, n in sorted(soaked.errors.items()))})" if soaked.errors else ""
    out.print(f"requests: {ended}{errors}; {soaked.pieces} pieces", highlight=False)
    verdict = f"{len(soaked.failures)} failures" if soaked.failures else "nothing lost, duplicated, wrong or left over"
    out.print(f"{verdict}; whole {slowest_s:.1f} s after a fault at the latest; seed {soaked.seed}", highlight=False)


def show_end(outcome: Outcome, out: Console) -> None:
    """Of one, when it has ended: what was done, how that was seen, and what does not hold."""
    for fired in outcome.fired:
        noticed = "" if fired.noticed_s is None else f"; the cluster noticed after {fired.noticed_s - fired.at_s:.2f} s"
        said = f"  {fired.at_s:7.2f} s  {fired.kind} {fired.victim}: {fired.seen}{noticed}"
        out.print(said, markup=False, highlight=False, soft_wrap=True)
    for failure in outcome.failures:
        out.print(f"  FAILED: {failure}", markup=False, highlight=False, soft_wrap=True)
    if outcome.refused is not None:
        out.print(f"  {outcome.scenario} cannot run here: {outcome.refused}", markup=False, highlight=False)


def write_timelines(path: Path, scenario: str, requests: Iterable[Request]) -> None:
    """Adds a line for each request: which, its verdict, and every try with the time of each piece."""
    with path.open("ab") as file:
        for request in requests:
            row = {"scenario": scenario, "verdict": request.verdict(), **msgspec.to_builtins(request)}
            file.write(msgspec.json.encode(row) + b"\n")
