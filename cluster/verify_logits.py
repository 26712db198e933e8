"""One process's logits beside those of `transformers`, at every position of random prompts: the proof that the decoder
computes the model that the checkpoint describes.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.random_models import RANDOM_MODELS, write_random_model
from cluster.verify_reference import greedy_context
from kvcache.memory import BlockMemory
from kvcache.storage import paged_view
from pipelines.models.config import ModelConfig, read_config
from pipelines.models.conversion import LINKED_GGUF_FILE, convert_gguf
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.decoders import build_decoder
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.step import build_step

TOLERANCE = 1e-3
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 257)
SEED = 7


@dataclass(frozen=True)
class LogitsReport:
    model: str
    prompts: int
    positions: int
    logits: int
    largest_difference: float
    relative_difference: float
    """Root of the mean square of the differences over that of transformers' logits around their mean."""

    @property
    def agrees(self) -> bool:
        return self.prompts > 0 and self.largest_difference <= TOLERANCE

    def __str__(self) -> str:
        word = "within" if self.agrees else "NOT within"
        return (
            f"logits of {self.model}: {self.prompts} prompts, {self.positions} positions, {self.logits} logits beside "
            f"transformers'; largest difference {self.largest_difference:.2e}, {word} {TOLERANCE:g}"
        )


def compare_logits(engine: EngineConfig) -> LogitsReport:
    """Of the model that `engine` serves, beside transformers in float32."""
    transformers.logging.disable_progress_bar()
    folder = Path(engine.model_path)
    theirs = _transformers_model(folder)
    config = read_config(folder)
    random = np.random.default_rng(SEED)
    prompts = [random.integers(0, config.vocab_size, size=n, dtype=np.int64) for n in PROMPT_LENGTHS]
    largest, squares, variance = 0.0, 0.0, 0.0
    for prompt, ours in zip(prompts, our_logits(config, engine, prompts), strict=True):
        with torch.no_grad():
            expected = theirs(torch.from_numpy(prompt)[None]).logits[0].numpy()
        assert expected.shape == ours.shape
        largest = max(largest, float(np.abs(expected - ours).max()))
        squares += float(((expected - ours) ** 2).mean()) * len(prompt)
        variance += float(expected.var()) * len(prompt)
    positions = sum(PROMPT_LENGTHS)
    relative = (squares / variance) ** 0.5
    return LogitsReport(engine.model_name, len(prompts), positions, positions * config.vocab_size, largest, relative)


def _transformers_model(folder: Path) -> PreTrainedModel:
    """`transformers` reads a GGUF file only with a package that nothing else here needs: it gets ours, converted."""
    with tempfile.TemporaryDirectory() as scratch:
        if (folder / LINKED_GGUF_FILE).is_file():
            convert_gguf(folder / LINKED_GGUF_FILE, Path(scratch))
            folder = Path(scratch)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval()


def compare_random_model(engine: EngineConfig) -> LogitsReport:
    """Of a small Llama with random weights, its heads grouped and its embeddings untied."""
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(RANDOM_MODELS["llama"], Path(folder))
        tiny = EngineConfig(
            model_path=folder,
            model_name="a random Llama",
            num_blocks=engine.num_blocks,
            threads=engine.threads,
            block_tokens=engine.block_tokens,
        )
        return compare_logits(tiny)


def our_logits(
    config: ModelConfig, engine: EngineConfig, prompts: list[NDArray[np.int64]]
) -> list[NDArray[np.float32]]:
    """Per prompt [tokens, vocab], each computed in one step."""
    layout = layout_of(engine)
    blocks = range(-(-max(map(len, prompts)) // engine.block_tokens))
    memory = BlockMemory.create(len(blocks), layout.block_bytes)
    decoder = build_decoder(config, engine, paged_view(memory, layout), max(PROMPT_LENGTHS))
    try:
        found = []
        for prompt in prompts:
            context = greedy_context(tuple(prompt.tolist()), 1, engine.model_name)
            step = build_step([context], [blocks], engine.block_tokens)
            everywhere = dataclasses.replace(step, sample_rows=np.arange(step.num_tokens))
            found.append(decoder.logits(everywhere).copy())
        return found
    finally:
        decoder.close()
