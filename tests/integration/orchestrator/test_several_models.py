"""Models at once behind one orchestrator, over real gRPC and real decoders: nothing of one is ever of use to another.

`tiny` and `twin` have the same weights under two names, `other` has others: what is shared where it must not be is seen
in what is cached, and what is mixed up in what is said.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode_nodes.engine import build as build_decode
from kvcache.memory import BlockMemory
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import GenerationJob
from orchestrator.presence import Presence
from orchestrator.replica import Replica
from orchestrator.replicas import Replicas
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.thread import ThreadEngine
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from prefill_nodes.engine import build as build_prefill
from pronghorn.deadline import Deadline
from pronghorn.errors import EndpointNotFound, ModelNotFound, Unavailable
from tests.fakes.canary_engine import SEED
from tests.fakes.orchestrator_cluster import config
from tests.fakes.tiny_model_folder import SHAPE
from tests.integration.nodes.rig import Node, Rig, at_rest, new_rig, orchestrator_identity

MODELS = ("tiny", "twin", "other")
PATIENCE_S = 60.0
PROMPT = [(11 * i) % 300 + 3 for i in range(33)]
BLOCK_TOKENS = 4
NEW_TOKENS = 6


@dataclass
class House:
    rig: Rig
    replicas: Replicas
    nodes: dict[str, list[Node]]

    async def answer(self, model: str, target_endpoint: str | None = None, **changes: Any) -> tuple[list[int], int]:
        """What it says, and how many of the prompt's tokens were cached."""
        context = TextContext(
            tokens=TokenBuffer(np.array(PROMPT, dtype=np.int64)),
            max_length=len(PROMPT) + NEW_TOKENS,
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            ignore_eos=True,
            model_name=model,
        )
        deadline = Deadline.after(self.rig.clock.now_s(), 2 * PATIENCE_S)
        job = GenerationJob(context, deadline, model, target_endpoint, **changes)
        async with self.replicas.generate(job) as outputs:
            said = [output async for output in outputs]
        return [token for one in said for token in one.tokens], said[0].num_cached_tokens or 0

    def keys(self, model: str) -> set[int]:
        """Of the blocks that the model's nodes are known to hold."""
        return {key for keys in self.replicas.by_model[model].holdings.dump().values() for key in keys}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, seed in (("tiny", 7), ("other", 8)):
        found[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(found[name])
    return found | {"twin": found["tiny"]}


def engine(kind: Any, folder: Path, model: str) -> ThreadEngine:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_tokens": BLOCK_TOKENS, "max_batch_size": 8}
    made = EngineConfig(str(folder), model, max_batch_input_tokens=16, report_period_s=0.05, **sizes)
    return ThreadEngine(kind, made, SEED, BlockMemory.create(made.total_blocks, layout_of(made).block_bytes))


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def house(folders: dict[str, Path]) -> AsyncIterator[House]:
    async with new_rig() as rig:
        nodes: dict[str, list[Node]] = {}
        for model in MODELS:
            names = {"model_name": model, "model_path": str(folders[model])}
            made = [engine(build, folders[model], model) for build in (build_decode, build_prefill)]
            decode = await rig.decode_over(made[0], f"decode-{model}", stall_timeout_s=PATIENCE_S, **names)
            nodes[model] = [decode, await rig.prefill_over(made[1], f"prefill-{model}", **names)]
            for node in nodes[model]:
                await node.shell.check_health()
        replicas = Replicas([replica(rig, model) for model in MODELS])
        replicas.start()
        try:
            await until(lambda: sum(view.unusable is None for view in replicas.views()) == 2 * len(MODELS))
            yield House(rig, replicas, nodes)
            await at_rest(*(node for pair in nodes.values() for node in pair))
        finally:
            await replicas.stop()
            assert replicas.failure() is None
            assert replicas.in_flight() == 0


def replica(rig: Rig, model: str) -> Replica:
    identity = msgspec.structs.replace(orchestrator_identity(), model=model)
    connector = GrpcConnector(identity, connect_timeout_s=PATIENCE_S, send_queue_frames=1024)
    told = config(model_name=model, max_length=256, disaggregation="always")
    return Replica(told, rig.registry, connector, rig.clock, seed=SEED)


async def test_models_with_the_same_prompt_share_no_block_and_each_answers_as_its_own(
    folders: dict[str, Path],
) -> None:
    async with house(folders) as cluster:
        answers = dict(zip(MODELS, await asyncio.gather(*map(cluster.answer, MODELS)), strict=True))
        assert {cached for _, cached in answers.values()} == {0}
        assert answers["tiny"][0] == answers["twin"][0] != answers["other"][0]
        blocks = (len(PROMPT) - 1) // BLOCK_TOKENS
        await until(lambda: all(len(cluster.keys(model)) >= blocks for model in MODELS))
        for model in MODELS:
            others = set().union(*(cluster.keys(other) for other in MODELS if other != model))
            assert not cluster.keys(model) & others
            own = {node.shell.name for node in cluster.nodes[model]}
            assert {view.name for view in cluster.replicas.by_model[model].views()} == own
        again = await cluster.answer("twin")
        assert again == (answers["twin"][0], blocks * BLOCK_TOKENS)
        for model in MODELS:
            for node in cluster.nodes[model]:
                await until(lambda node=node, model=model: set(node.shell.exchange.peers()) == others_of(node, model))


def others_of(node: Node, model: str) -> set[str]:
    return {f"decode-{model}", f"prefill-{model}"} - {node.shell.name}


async def test_a_node_of_another_model_is_refused_by_name_and_so_is_a_model_that_is_not_there(
    folders: dict[str, Path],
) -> None:
    async with house(folders) as cluster:
        for endpoint in ("prefill-other", f"tcp://{cluster.nodes['other'][1].shell.address}"):
            with pytest.raises(EndpointNotFound, match="is a node of the model 'other', and the request is for 'tiny'"):
                await cluster.answer("tiny", endpoint)
        with pytest.raises(EndpointNotFound, match=r"is not registered; the prefill nodes are: prefill-tiny \("):
            await cluster.answer("tiny", "prefill-9")
        with pytest.raises(ModelNotFound, match="'tinier'"):
            await cluster.answer("tinier")
        assert (await cluster.answer("tiny", "prefill-tiny"))[1] == 0


async def test_a_hint_that_names_a_node_of_another_model_is_a_miss(folders: dict[str, Path]) -> None:
    async with house(folders) as cluster:
        said, _ = await cluster.answer("tiny")
        hint = {"version": 1, "nodes": {"decode-tiny": ["00" * 8]}}
        assert await cluster.answer("twin", hint=hint) == (said, 0)


async def test_a_model_without_nodes_is_unready_and_takes_nothing_from_the_others(folders: dict[str, Path]) -> None:
    async with house(folders) as cluster:
        replicas = cluster.replicas
        for node in cluster.nodes["other"]:
            await node.shell.stop()
        await until(lambda: not replicas.by_model["other"].ready()[0])
        ready, reason = replicas.ready()
        assert ready and "other: 0 decode and 0 prefill nodes are usable" in reason
        assert {state.name: state.ready for state in replicas.models()} == {"tiny": True, "twin": True, "other": False}
        with pytest.raises(Unavailable):
            await cluster.answer("other")
        assert (await cluster.answer("tiny"))[1] == 0


async def test_an_orchestrators_row_ledger_and_metrics_tell_of_every_model(folders: dict[str, Path]) -> None:
    async with house(folders) as cluster:
        identity = msgspec.structs.replace(orchestrator_identity(), model=MODELS[0])
        presence = Presence(cluster.replicas, identity, cluster.rig.registry, 600.0)
        await presence.start("127.0.0.1")
        try:
            await cluster.answer("twin")
            rows = await cluster.rig.registry.orchestrators.list()
            assert [(row.model, row.models) for row in rows] == [("tiny", list(MODELS))]
            ledger = await presence.operations.ledger()
            assert sorted(row.owner for row in ledger.held if row.kind.value == "session") == sorted(
                node.shell.name for pair in cluster.nodes.values() for node in pair
            )
            text = presence.operations.metrics.text().decode()
            for model, count in (("tiny", 0), ("twin", 1), ("other", 0)):
                labels = f'model_name="{model}",role="orchestrator"'
                assert f"pronghorn:num_nodes_usable{{{labels}}} 2.0" in text
                accepted = f'pronghorn:events_total{{event="request_accepted",model_name="{model}",reason=""'
                assert (accepted in text) == bool(count)
        finally:
            await presence.stop()
