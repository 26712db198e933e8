"""Models that transformers' own modules compute, on the paged cache; what each gives is held to transformers in
`tests/integration/cluster/test_verify_families.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.random_models import FOREIGN_MODELS, RandomModel, write_random_model
from kvcache.memory import BlockMemory
from kvcache.storage import paged_view
from pipelines.models.config import read_config
from pipelines.models.foreign_config import ForeignConfig
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.decoders import build_decoder
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.step import Step
from pronghorn.errors import ConfigurationError

BLOCKS = [5, 2, 7, 0]


def step_of(tokens: np.ndarray[Any, Any], first: int) -> Step:
    """The tokens from `first` on, as the next window of one sequence in BLOCKS."""
    positions = np.arange(first, len(tokens))
    table = np.array(BLOCKS)
    return Step(
        token_ids=tokens[first:],
        positions=positions,
        slots=table[positions // 16] * 16 + positions % 16,
        starts=np.array([0, len(positions)]),
        contexts=np.array([len(tokens)]),
        tables=table[None],
        sample_rows=np.array([len(positions) - 1]),
    )


def decoder_of(folder: Path) -> Any:
    config = EngineConfig(str(folder), "foreign", num_blocks=8)
    layout = layout_of(config)
    memory = BlockMemory.create(8, layout.block_bytes)
    return build_decoder(read_config(folder), config, paged_view(memory, layout), 64)


@pytest.mark.parametrize("name", ["gemma2, windows and soft caps", "phi", "gpt2"])
def test_chunks_and_single_tokens_give_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    model = write_random_model(FOREIGN_MODELS[name], tmp_path)
    decoder = decoder_of(tmp_path)
    tokens = np.random.default_rng(1).integers(2, 200, size=53)
    for first, end in ((0, 17), (17, 50), (50, 51), (51, 53)):
        logits = decoder.logits(step_of(tokens[:end], first))
        with torch.inference_mode():
            wanted = model(torch.from_numpy(tokens[None, :end])).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[0], wanted, atol=1e-3)


@pytest.mark.field("ROCm/ATOM#2154")
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (RandomModel("bloom", {"n_layer": 2, "n_head": 4, "max_position_embeddings": 64}), "Bloom.*cannot be replaced"),
        (RandomModel("rwkv", {"attention_hidden_size": 48}), "Rwkv"),
        (RandomModel("recurrent_gemma", {"lru_width": 48, "head_dim": 12}), "RecurrentGemma"),
    ],
)
def test_what_cannot_run_on_the_paged_cache_is_refused_by_name(model: RandomModel, named: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model.model_type, vocab_size=211, hidden_size=48, num_hidden_layers=2, **model.changes)
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=named):
        decoder_of(tmp_path)


def test_a_config_that_says_other_than_the_model_does_is_refused_at_its_first_step(tmp_path: Path) -> None:
    write_random_model(FOREIGN_MODELS["olmo2"], tmp_path)
    config = read_config(tmp_path)
    assert isinstance(config, ForeignConfig)
    pool = torch.zeros(8, 3, 2, 4, 16, 12)
    lying = build_decoder(
        ForeignConfig("Olmo2ForCausalLM", 211, 3, 4, 4, 12, 64, (None,) * 3),
        EngineConfig(str(tmp_path), "foreign", num_blocks=8),
        pool,
        64,
    )
    with pytest.raises(ConfigurationError, match="keys of 2 heads of 12, and the cache is made for 4 of 12"):
        lying.logits(step_of(np.arange(5), 0))
