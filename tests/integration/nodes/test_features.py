"""Every feature of generation on real nodes with a real model apart, beside one process with the same model."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.verify_features import Case, Feature, cases_of, compare_feature, features, prompts
from cluster.verify_outcome import Outcome, new_outcome
from cluster.verify_reference import OneProcess
from cluster.verify_structured import structured_features
from decode_nodes.engine import build as build_decode
from decode_nodes.scheduler import DecodeScheduler
from decode_nodes.sequence import Sequence
from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.text_engine import build_text_engine
from pipelines.runtime.thread import ThreadEngine
from pipelines.types.frames import PrefillTarget, Submit
from pipelines.types.text_context import TextContext
from prefill_nodes.engine import build as build_prefill
from pronghorn.ids import Fence, Incarnation
from tests.fakes.canary_engine import SEED
from tests.fakes.tiny_models import tiny_model
from tests.fakes.tokenizer_folder import ascii_tokenizer
from tests.integration.nodes.rig import Orchestrator, Rig, at_rest, target

PROCESSORS = {"no_repeat": "tests.fakes.logits_processors:no_repeat"}
FEATURES = [*features(sorted(PROCESSORS)), *structured_features()]
PREEMPTED = [feature for feature in FEATURES if not feature.name.startswith(("regex", "tools required"))]
SHORT = {"max_tokens of one", "stop (as tokens)"}
"""Those whose answers may end before any block is missing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", path)
    ascii_tokenizer(211).save(str(path / "tokenizer.json"))
    return path


def config(folder: Path, **changes: object) -> EngineConfig:
    fields: dict[str, object] = {
        "model_path": str(folder),
        "model_name": "canary",
        "num_blocks": 64,
        "block_tokens": 4,
        "max_batch_size": 8,
        "max_batch_input_tokens": 8,
        "report_period_s": 0.05,
        "logits_processors": PROCESSORS,
    }
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]  # the caller's names are the fields'


def engine(kind: object, config: EngineConfig) -> ThreadEngine:
    memory = BlockMemory.create(config.total_blocks, layout_of(config).block_bytes)
    return ThreadEngine(kind, config, SEED, memory)  # type: ignore[arg-type]  # one of the two builders


@pytest.fixture
async def one_process(folder: Path) -> AsyncIterator[OneProcess]:
    reference = OneProcess(config(folder))
    await reference.start()
    yield reference
    await reference.stop()


class Cluster:
    def __init__(self, orchestrator: Orchestrator, *prefill: PrefillTarget) -> None:
        self._orchestrator = orchestrator
        self._prefill = list(prefill)
        self._one_writer = asyncio.Lock()

    async def run(self, context: TextContext) -> Outcome:
        orchestrator = self._orchestrator
        context.model_name = "canary"
        outcome = new_outcome(context.num_choices)
        fence = Fence(context.request_id, 1, Incarnation(orchestrator.node.incarnation))
        async with self._one_writer:
            await orchestrator.send(Submit(fence, context, 60.0, self._prefill, only_these=bool(self._prefill)))
        await orchestrator.result(fence)
        for delta in orchestrator.deltas[fence]:
            outcome.take_delta(delta)
        return outcome


async def compare(feature: Feature, reference: OneProcess, cluster: Cluster, new_tokens: int) -> None:
    cases: list[Case] = await cases_of(prompts(4, 211, 7, quick=False), new_tokens, reference.run)
    report = await compare_feature(feature, cases, reference.run, cluster.run)
    assert report.faults == []
    assert report.equal == 9


@pytest.mark.conformance(47, 69)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
async def test_apart_every_feature_gives_what_one_process_gives(
    rig: Rig, folder: Path, one_process: OneProcess, feature: Feature
) -> None:
    prefill = await rig.prefill_over(engine(build_prefill, config(folder)))
    decode = await rig.decode_over(engine(build_decode, config(folder)))
    await compare(feature, one_process, Cluster(await rig.orchestrator(decode), target(prefill)), 8)
    await at_rest(prefill, decode)


class Preempting(DecodeScheduler):
    """Counts what it does."""

    preemptions = 0

    def _preempt(self, sequence: Sequence) -> None:
        Preempting.preemptions += 1
        super()._preempt(sequence)


def build_preempting(config: EngineConfig, seed: bytes, memory: BlockMemory) -> EngineParts:
    return build_text_engine(config, seed, memory, Preempting)


@pytest.mark.conformance(51)
@pytest.mark.parametrize("feature", PREEMPTED, ids=lambda feature: feature.name)
async def test_where_decode_has_too_few_blocks_and_preempts_nothing_changes(
    rig: Rig, folder: Path, one_process: OneProcess, feature: Feature
) -> None:
    prefill = await rig.prefill_over(engine(build_prefill, config(folder)))
    decode = await rig.decode_over(engine(build_preempting, config(folder, num_blocks=14)))
    Preempting.preemptions = 0
    await compare(feature, one_process, Cluster(await rig.orchestrator(decode), target(prefill)), 24)
    await at_rest(prefill, decode)
    assert Preempting.preemptions > 0 or feature.name in SHORT
