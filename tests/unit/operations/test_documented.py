"""docs/operations.md names exactly what the code serves."""

import re
from pathlib import Path

import pytest

from operations.metrics import GAUGES, PREFIX, TOTALS, Metrics, Reading, RequestMetrics
from operations.port import ROUTES
from pronghorn.ledger import MEANING, STANDING, Kind

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below `heading`, their cells without backquotes."""
    lines = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [[_bare(cell.strip()) for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def _bare(cell: str) -> str:
    return cell.strip("`") if cell.startswith("`") and cell.count("`") == 2 else cell


def test_the_routes_are_those_that_are_served() -> None:
    assert dict(table("Routes")) == ROUTES  # type: ignore[arg-type]  # rows of two cells


def test_the_kinds_are_those_of_the_ledger() -> None:
    standing = {kind.value: "standing" if kind in STANDING else "of a request" for kind in Kind}
    assert table("The ledger") == [[kind.value, standing[kind], text] for kind, text in MEANING.items()]


@pytest.mark.parametrize("texts", [GAUGES, {f"{name}_total": text for name, text in TOTALS.items()}])
def test_gauges_and_totals_are_told_in_the_codes_own_words(texts: dict[str, str]) -> None:
    told = {name: text for name, _, text in table("Metrics")}
    assert texts.items() <= told.items()


def test_no_metric_is_missing_and_none_is_invented() -> None:
    every = Reading(dict.fromkeys(GAUGES, 1.0), [], {"submitted": 1}, cache=(16, 8))
    metrics = Metrics("decode", {"m": lambda: every})
    RequestMetrics(metrics).of("m").finished("stop", 1.0)
    served = set(re.findall(rf"^# TYPE {PREFIX}(\S+) (\S+)$", metrics.text().decode(), re.MULTILINE))
    served = {(name, kind) for name, kind in served if not name.endswith("_created")}
    assert {(name, kind) for name, kind, _ in table("Metrics")} == served
