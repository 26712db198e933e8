"""Every family of models, with random weights: logits beside transformers', P/D tokens beside one process's."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from cluster.random_models import FOREIGN_MODELS, RANDOM_MODELS, write_random_model
from cluster.verify_families import NUM_BLOCKS, SHORT_STORAGE, FamilyReport, compare_family, compare_pools, show
from kvcache.layout import KVDtype
from pipelines.models.registry import FAMILIES
from pipelines.runtime.config import EngineConfig

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


@pytest.mark.field("sglang#12157")
@pytest.mark.parametrize("name", list(MODELS))
async def test_a_family_agrees(name: str, reports: list[FamilyReport]) -> None:
    report = await compare_family(name, MODELS[name], every=5)
    reports.append(report)
    assert report.agrees, (str(report.logits), {d: r.relative_difference for d, r in report.short.items()})
    assert sum(report.tokens.verdicts.values()) == 3
    assert report.tokens.warm_blocks > 0
    assert set(report.short) == set(SHORT_STORAGE)


@pytest.mark.field("sglang#12157")
@pytest.mark.parametrize("block_tokens", [3, 16, 32])
@pytest.mark.parametrize("dtype", get_args(KVDtype))
async def test_tokens_apart_are_those_of_one_process(tmp_path: Path, dtype: KVDtype, block_tokens: int) -> None:
    """sglang#12157: answers were wrong with prefill and decode apart, and only then."""
    write_random_model(RANDOM_MODELS["llama"], tmp_path)
    engine = EngineConfig(str(tmp_path), "llama", num_blocks=NUM_BLOCKS, dtype=dtype, block_tokens=block_tokens)
    report = await compare_pools(engine)
    assert not report.faults
    assert report.verdicts["equal"] >= 14 and sum(report.verdicts.values()) == 15
    assert report.warm_blocks == 9


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_no_family_is_without_a_model(architecture: str) -> None:
    prefix = architecture.removesuffix("ForCausalLM").lower()
    assert any(model.model_type == prefix for model in RANDOM_MODELS.values())
