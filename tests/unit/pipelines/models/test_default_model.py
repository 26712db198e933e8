"""The real model, fetched where it is not here yet."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvcache.memory import BlockMemory
from pipelines.models.fetch import default_model_folder
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.text_pipeline import TextGenerationPipeline, layout_of
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import RequestID

CACHE = Path.home() / ".cache" / "pronghorn" / "models"
FETCH_TIMEOUT_S = 1500
pytestmark = [pytest.mark.model, pytest.mark.timeout(FETCH_TIMEOUT_S)]


class FirstBlocks:
    """One sequence at a time, in the first blocks."""

    def table(self, owner: RequestID) -> range:
        return range(40)


def greedy(pipeline: TextGenerationPipeline, prompt: list[int], count: int) -> list[int]:
    context = TextContext(
        max_length=2000,
        tokens=TokenBuffer(np.array(prompt)),
        sampling_params=SamplingParams(temperature=0.0, seed=0),
    )
    for _ in range(count):
        pipeline.execute(TextGenerationInputs([[context]]))
    return context.tokens.generated.tolist()


@pytest.fixture(scope="module")
def folder() -> Path:
    return default_model_folder(CACHE)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> TextGenerationPipeline:
    config = EngineConfig(str(folder), "default", num_blocks=40, threads=2)
    memory = BlockMemory.create(40, layout_of(config).block_bytes)
    made = TextGenerationPipeline(config, memory, FirstBlocks())
    made.canary()
    return made


def test_it_knows_the_capital_of_france(pipeline: TextGenerationPipeline, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = greedy(pipeline, tokenizer.encode(prompt).ids, 8)
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == "The capital of France is Paris."


def test_its_tokens_are_those_of_transformers(pipeline: TextGenerationPipeline, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in (15, 16, 17, 100):
        prompt = np.random.default_rng(length).integers(100, 49000, size=length)
        with torch.inference_mode():
            ids = torch.from_numpy(prompt)[None]
            out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert greedy(pipeline, prompt.tolist(), 12) == out[0, length:].tolist()
