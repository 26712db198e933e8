"""Faults by the phase of the request that they strike: what plays each cell, and why nothing plays the others.

A test claims cells with a `cells` mark, `F5 P3-P7` or `F5 P3`; what a scenario of `pronghorn chaos` plays stands in
`SCENARIOS`. Where a test lies says how near to a real cluster it is. Pure: renders docs/fault-matrix.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "fault-matrix.md"
SCENARIO_FOLDER = ROOT / "cluster" / "chaos" / "scenarios"

FAULTS = {
    "F1": "a node is killed",
    "F2": "a node is stopped, and goes on later",
    "F3": "a node leaves in good order",
    "F4": "a machine is lost",
    "F5": "cut from prefill to decode",
    "F6": "cut both ways",
    "F7": "the link is slow",
    "F8": "the connection is reset",
    "F9": "a block is damaged, doubled or lost",
    "F10": "a tier of the cache is full",
    "F11": "Redis fails, in whatever way",
    "F12": "an orchestrator is killed",
    "F13": "Ray's head or GCS restarts",
    "F14": "clocks differ by minutes",
    "F15": "an engine dies alone, as out of memory",
    "F16": "the client leaves",
    "F17": "restarted under the same name",
    "F18": "nodes join and leave",
    "F19": "four times the load",
    "F20": "two at once",
}

PHASES = {
    "P1": "queued",
    "P2": "routed",
    "P3": "prefill half done",
    "P4": "prefill done",
    "P5": "first block",
    "P6": "half of the blocks",
    "P7": "last block",
    "P8": "admitted",
    "P9": "token 1",
    "P10": "token k",
    "P11": "last token",
}

SCENARIOS = {
    "bit-flipped": "F9 P6",
    "decode-engine-killed": "F15 P10",
    "decode-killed": "F1 P10",
    "decode-killed-at-first-tokens": "F1 P9",
    "decode-stopped": "F2 P10",
    "drain-decode": "F3 P10",
    "gcs-killed": "F13 P10",
    "link-slow": "F7 P6",
    "orchestrator-killed": "F12 P10",
    "overload": "F19 P10",
    "prefill-cut": "F6 P6",
    "prefill-cut-one-way": "F5 P6",
    "prefill-killed-computing": "F1 P3",
    "prefill-killed-handing-over": "F1 P6",
    "prefill-killed-when-all-is-handed-over": "F1 P7",
    "prefill-reset": "F8 P6",
    "raylet-killed": "F4 P10",
    "redis-flushed": "F11 P10",
    "redis-killed": "F11 P10",
    "scaled": "F18 P10",
    "two-at-once": "F20 P10",
}

WHY_NOT = {
    "F9": "no block is on its way then",
    "F13": "no phase of its own: nothing of a request passes through Ray",
}
"""Of a fault's cells that nothing plays."""

HEAD = """# Faults by phase

Which fault is played at which phase of a request, and how: *sim*, on the simulated cluster; *fast*, real shells and
sockets in `make test`; *full*, real processes, in `make test-more` or `make chaos`. A letter stands for a reason, given
below. Each way of playing asserts what it says of itself: the simulator that every request ends once, in time and with
the right tokens, that everybody is at rest afterwards and that the fault was done; no cell speaks of speed.

Made from the `cells` marks on the tests: run `python -m tests.field.generate`. A test compares this file with them.
"""


def cells(claim: str) -> Iterator[tuple[str, str]]:
    """The cells of one claim. ValueError where it names none."""
    match = re.fullmatch(r"(F\d+) P(\d+)(?:-P(\d+))?", claim)
    if match is None or match[1] not in FAULTS:
        raise ValueError(f"{claim!r} is no claim; write F1 P2 or F1 P2-P5, with F1 to F20 and P1 to P11")
    first, last = int(match[2]), int(match[3] or match[2])
    if not 1 <= first <= last <= len(PHASES):
        raise ValueError(f"{claim!r} names phases beyond P1 to P11, or none")
    for number in range(first, last + 1):
        yield match[1], f"P{number}"


def tier(test: str) -> str:
    if "simulator" in (ROOT / test.split("::")[0]).read_text(encoding="utf-8"):
        return "sim"
    return "full" if test.startswith(("tests/more/", "tests/clients/")) else "fast"


def render(claims: Mapping[str, Sequence[str]]) -> str:
    """ValueError where a claim is none, a scenario is missing, or a cell has neither a test nor a reason."""
    played: dict[tuple[str, str], set[str]] = {}
    by: dict[str, set[str]] = {}
    for claim, tests in claims.items():
        for fault, phase in cells(claim):
            played.setdefault((fault, phase), set()).update(map(tier, tests))
            by.setdefault(fault, set()).update(f"`{test.removeprefix('tests/')}`" for test in tests)
    for scenario, claim in SCENARIOS.items():
        if not (SCENARIO_FOLDER / f"{scenario}.yaml").exists():
            raise ValueError(f"there is no scenario {scenario}")
        for fault, phase in cells(claim):
            played.setdefault((fault, phase), set()).add("full")
            by.setdefault(fault, set()).add(f"scenario `{scenario}`")
    letters = {fault: chr(ord("a") + i) for i, fault in enumerate(WHY_NOT)}
    lines = [HEAD, f"| | {' | '.join(PHASES.values())} |", f"|---|{'---|' * len(PHASES)}"]
    for fault, name in FAULTS.items():
        row = [_cell(played.get((fault, phase), set()), fault, phase, letters) for phase in PHASES]
        lines.append(f"| {fault} {name} | {' | '.join(row)} |")
    lines += ["", *(f"- {letters[fault]}: {fault}, {reason}" for fault, reason in WHY_NOT.items())]
    lines += ["", "| | played by |", "|---|---|"]
    lines += [f"| {fault} | {'<br>'.join(sorted(by[fault]))} |" for fault in FAULTS if fault in by]
    return "\n".join(lines) + "\n"


def _cell(tiers: set[str], fault: str, phase: str, letters: Mapping[str, str]) -> str:
    if tiers:
        return " ".join(each for each in ("sim", "fast", "full") if each in tiers)
    if fault not in letters:
        raise ValueError(f"nothing plays {fault} at {phase}, and no reason is given")
    return letters[fault]
