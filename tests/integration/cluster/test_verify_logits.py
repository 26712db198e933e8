"""The proof that `pronghorn verify parity` gives of a model's logits, on small models of both kinds of file."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.verify_logits import compare_logits, compare_random_model
from pipelines.models.config import read_config
from pipelines.models.conversion import link_gguf
from pipelines.runtime.config import EngineConfig
from tests.fakes.gguf_model import write_gguf

MODEL = LlamaConfig(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)


def engine(folder: Path) -> EngineConfig:
    return EngineConfig(model_path=str(folder), model_name=folder.name, num_blocks=32, threads=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    LlamaForCausalLM(MODEL).save_pretrained(folder)
    return folder


def test_a_random_model_agrees(checkpoint: Path) -> None:
    report = compare_random_model(engine(checkpoint))
    assert report.agrees, str(report)
    assert report.positions == 406


def test_a_gguf_file_agrees_with_transformers(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", read_config(checkpoint), checkpoint)
    folder = tmp_path / "linked"
    folder.mkdir()
    link_gguf(tmp_path / "model.gguf", folder)
    report = compare_logits(engine(folder))
    assert report.agrees, str(report)
