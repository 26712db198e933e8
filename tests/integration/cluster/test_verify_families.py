"""Every family of models, with random weights: logits beside transformers', P/D tokens beside one process's."""

from collections.abc import Iterator

import pytest
from rich.console import Console

from cluster.random_models import FOREIGN_MODELS, RANDOM_MODELS
from cluster.verify_families import SHORT_STORAGE, FamilyReport, compare_family, show
from pipelines.models.registry import FAMILIES

MODELS = RANDOM_MODELS | FOREIGN_MODELS


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[list[FamilyReport]]:
    """Of the tests of this module, printed as a table when they are through."""
    made: list[FamilyReport] = []
    yield made
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        console = Console(width=160)
        console.print()
        show(made, console)


@pytest.mark.parametrize("name", list(MODELS))
async def test_a_family_agrees(name: str, reports: list[FamilyReport]) -> None:
    report = await compare_family(name, MODELS[name], every=5)
    reports.append(report)
    assert report.agrees, (str(report.logits), {d: r.relative_difference for d, r in report.short.items()})
    assert sum(report.tokens.verdicts.values()) == 3
    assert report.tokens.warm_blocks > 0
    assert set(report.short) == set(SHORT_STORAGE)


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_no_family_is_without_a_model(architecture: str) -> None:
    prefix = architecture.removesuffix("ForCausalLM").lower()
    assert any(model.model_type == prefix for model in RANDOM_MODELS.values())
