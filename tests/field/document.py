"""The text of docs/field.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.field.rows import Row

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "field.md"

HEAD = """# What the field has suffered

Faults that users of other serving systems have reported, and the tests that show that they do not happen here. "later"
names what no test shows yet.

Made from the `field` marks on the tests: mark a test with the name of an issue, then run
`python -m tests.field.generate`. A test compares this file with the marks.
"""


def render(rows: Sequence[Row], claims: Mapping[str, Sequence[str]]) -> str:
    """ValueError where a claim names no row, a row is named twice, or a row without `later` has no test."""
    named = [issue for row in rows for issue in row.issues]
    if len(named) != len(set(named)):
        raise ValueError(f"named twice: {sorted({issue for issue in named if named.count(issue) > 1})}")
    if unknown := sorted(claims.keys() - set(named)):
        raise ValueError(f"no row names {unknown}, which these tests claim: {[claims[issue] for issue in unknown]}")
    lines = [HEAD, "| | reported as | shown | by |", "|---|---|---|---|"]
    for row in rows:
        tests = sorted({test for issue in row.issues for test in claims.get(issue, ())})
        if row.later is None and not tests:
            raise ValueError(f"no test is marked with {row.issues}, and the row does not say what is to come later")
        proofs = [f"`{test.removeprefix('tests/')}`" for test in tests]
        if row.later is not None:
            proofs.append(f"later: {row.later}")
        lines.append(f"| {row.section} | {', '.join(row.issues)} | {row.shown} | {'<br>'.join(proofs)} |")
    return "\n".join(lines) + "\n"
