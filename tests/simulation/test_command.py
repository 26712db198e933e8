"""`pronghorn sim`, as people use it."""

from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster import cli
from cluster.simulator.planted import PlantedBug, planted


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The console as it is when its output is captured, not as it was when the module was imported."""
    with monkeypatch.context() as patch:
        patch.setattr(cli, "out", Console(width=160))
        yield


def test_seeds_without_a_violation_end_well() -> None:
    result = CliRunner().invoke(cli.app, ["sim", "--seeds", "3", "--seed", "40"])
    assert result.exit_code == 0, result.output
    assert "3 seeds, 0 violations" in result.output


def test_a_failing_seed_is_told_and_made_smaller() -> None:
    with planted(PlantedBug.NEVER_RELEASED):
        result = CliRunner().invoke(cli.app, ["sim", "--seeds", "12"])
    assert result.exit_code == 1, result.output
    assert "made smaller" in result.output
    assert "VIOLATION" in result.output
    assert "failing seeds:" in result.output


def test_a_load_prints_what_its_clients_saw() -> None:
    result = CliRunner().invoke(cli.app, ["sim", "--nodes", "10", "--requests", "300"])
    assert result.exit_code == 0, result.output
    for word in ("time to first token", "inter-token latency", "goodput", "reuse", "wall time"):
        assert word in result.output
