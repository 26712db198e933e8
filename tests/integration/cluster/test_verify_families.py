"""Every family of models, with random weights: logits beside transformers', P/D tokens beside one process's."""

import pytest
from rich.console import Console

from cluster.random_models import FOREIGN_MODELS, RANDOM_MODELS
from cluster.verify_families import SHORT_STORAGE, compare_all, show
from pipelines.models.registry import FAMILIES


async def test_every_family_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        console = Console(width=160)
        console.print()
        reports = await compare_all(console, every=5)
        agreed = show(reports, console)
    assert agreed
    assert {report.architecture for report in reports} > set(FAMILIES)
    for report in reports:
        assert sum(report.tokens.verdicts.values()) == 3
        assert report.tokens.warm_blocks > 0
        assert set(report.short) == set(SHORT_STORAGE)
    assert len(reports) == len(RANDOM_MODELS) + len(FOREIGN_MODELS)
