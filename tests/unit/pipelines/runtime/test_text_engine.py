"""The text engine over a random model: as many replicas as it has, it says the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode_nodes.scheduler import DecodeScheduler
from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.messages import Admit, TokenDelta
from pipelines.runtime.text_engine import build_text_engine, of_replica
from pipelines.runtime.text_pipeline import layout_of
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import ConfigurationError
from pronghorn.ids import RequestID
from tests.fakes.engine_play import fence

VOCAB_SIZE = 97
PROMPTS = [
    [(7 * i + start) % VOCAB_SIZE for i in range(length)] for start, length in ((0, 40), (50, 9), (0, 36), (3, 1))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    shape = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def config_of(model: Path, **changes: object) -> EngineConfig:
    fields: dict[str, object] = {"num_blocks": 24, "max_batch_size": 4, "max_batch_input_tokens": 16}
    return EngineConfig(str(model), "tiny", **(fields | changes))  # type: ignore[arg-type]  # the fields' own types


def build(config: EngineConfig) -> tuple[EngineParts, BlockMemory]:
    memory = BlockMemory.create(config.total_blocks, layout_of(config).block_bytes)
    return build_text_engine(config, bytes(32), memory, DecodeScheduler), memory


def answers(config: EngineConfig, new_tokens: int = 12) -> list[list[int]]:
    parts, memory = build(config)
    scheduler = parts.scheduler
    said: dict[str, list[int]] = {}
    for index, prompt in enumerate([*PROMPTS, PROMPTS[0], PROMPTS[0]]):
        name = f"r{index}"
        context = TextContext(
            request_id=RequestID(name),
            tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
            max_length=len(prompt) + new_tokens,
            sampling_params=SamplingParams(temperature=0.0, seed=0),
        )
        scheduler.handle(Admit(fence(name), context, 60.0, prefill_here=True), 0.0)
        said[name] = []
        for _ in range(2):  # so that some come while others decode, and find a prefix
            step(parts, memory, said)
    while step(parts, memory, said):
        pass
    assert scheduler.load().held_blocks == 0
    return list(said.values())


def step(parts: EngineParts, memory: BlockMemory, said: dict[str, list[int]]) -> bool:
    for copy in parts.scheduler.take_copies():
        memory.copy(copy.source, copy.destination)
    batch = parts.scheduler.next_batch(0.0)
    if batch is not None:
        parts.scheduler.complete(batch, parts.pipeline.execute(batch), {}, 0.0)
        parts.scheduler.check()
    for event in parts.scheduler.take_events():
        if isinstance(event, TokenDelta):
            said[event.fence.request_id.value] += event.tokens
    return batch is not None


@pytest.mark.conformance(52)
def test_replicas_say_what_one_engine_says(model: Path) -> None:
    alone = answers(config_of(model))
    assert alone[0] == alone[4] == alone[5] and all(len(tokens) == 12 for tokens in alone)
    assert answers(config_of(model, data_parallel=2)) == alone
    assert answers(config_of(model, data_parallel=2, device_graph_capture=True)) == alone


def test_the_memory_is_made_for_all_replicas(model: Path) -> None:
    config = config_of(model, data_parallel=2)
    memory = BlockMemory.create(config.num_blocks, layout_of(config).block_bytes)
    with pytest.raises(ConfigurationError, match="was made for 24 blocks of .* the engine has 48"):
        build_text_engine(config, bytes(32), memory, DecodeScheduler)


def test_the_models_length_is_held_against_the_total_context(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_batch_total_tokens: 100 is below max_length \(128\)"):
        build(config_of(model, max_batch_total_tokens=100))


def test_each_replica_has_a_device_of_its_own(model: Path) -> None:
    two = config_of(model, data_parallel=2, device="cuda")
    assert [of_replica(two, index).device for index in range(2)] == ["cuda:0", "cuda:1"]
    assert of_replica(config_of(model, data_parallel=2), 1).device == "cpu"
    assert of_replica(config_of(model, device="cuda"), 0).device == "cuda"
