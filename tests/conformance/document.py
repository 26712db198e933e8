"""The text of docs/conformance.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "conformance.md"

HEAD = """# Conformance

What a server of this family must do, and the tests that prove it here. "later" means that no test does; behind tests
it names the part of the row that they do not prove.

Made from the `conformance` marks on the tests: mark a test, then run `python -m tests.conformance.generate`. A test
compares this file with the marks.
"""


def render(rows: Mapping[int, str], claims: Mapping[int, Sequence[str]], open_: Mapping[int, str]) -> str:
    """`open_`: what of a row its tests do not prove. ValueError where a claim or an open part has no row or no test."""
    unknown = {row: tests for row, tests in claims.items() if row not in rows}
    if unknown:
        raise ValueError(f"there are no rows {sorted(unknown)}, which these tests claim: {unknown}")
    if unclaimed := sorted(open_.keys() - claims.keys()):
        raise ValueError(f"rows {unclaimed} are open in part, and no test proves the rest")
    whole, part = len(claims.keys() - open_.keys()), len(open_)
    said = f"{whole} of {len(rows)} rows are proven whole, {part} in part, {len(rows) - whole - part} not at all."
    lines = [HEAD, said, "", "| # | feature | proven by |", "|---|---|---|"]
    for row, feature in rows.items():
        proofs = [f"`{test.removeprefix('tests/')}`" for test in claims.get(row, ())]
        if row in open_:
            proofs.append(f"later: {open_[row]}")
        lines.append(f"| {row} | {feature} | {'<br>'.join(proofs) or 'later'} |")
    return "\n".join(lines) + "\n"
