from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pipelines.models.config import read_config
from pipelines.models.conversion import convert_gguf, link_gguf
from pipelines.models.gguf_file import GGUFFile
from pipelines.models.rope import inverse_frequencies
from pipelines.models.weights import check_weights, open_weights
from pronghorn.errors import ConfigurationError
from tests.fakes.gguf_model import write_gguf
from tests.fakes.tiny_models import tiny_model


@pytest.fixture(scope="module", params=["llama", "llama, tied embeddings"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(request.param, folder)
    return folder


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", read_config(checkpoint), checkpoint)
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        ("llama", "llama"),
        ("llama, tied embeddings", "llama"),
        ("llama, every bias", "llama"),
        ("mistral, window", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("smollm3", "smollm3"),
    ],
)
@pytest.mark.parametrize("write", [convert_gguf, link_gguf])
def test_a_gguf_becomes_the_checkpoint_that_it_was_made_from(
    shape: str, architecture: str, tmp_path: Path, write: Any
) -> None:
    checkpoint, made, folder = tmp_path / "checkpoint", tmp_path / "tiny.gguf", tmp_path / "folder"
    tiny_model(shape, checkpoint)
    write_gguf(made, read_config(checkpoint), checkpoint, architecture=architecture)
    folder.mkdir()
    write(made, folder)
    assert read_config(folder) == read_config(checkpoint)
    check_weights(folder, read_config(folder))
    ours, original = open_weights(folder), open_weights(checkpoint)
    assert ours.names() == original.names()
    for name in original.names():
        np.testing.assert_array_equal(ours.tensor(name).numpy(), original.tensor(name).numpy(), err_msg=name)


def test_rope_frequencies_that_a_file_stores_stretch_the_tables(checkpoint: Path, tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 16, dtype=np.float32)
    write_gguf(tmp_path / "long.gguf", read_config(checkpoint), checkpoint, rope_factors=factors)
    convert_gguf(tmp_path / "long.gguf", tmp_path)
    plain, stretched = (inverse_frequencies(read_config(folder)) for folder in (checkpoint, tmp_path))
    np.testing.assert_array_equal(stretched.numpy(), (plain / torch.from_numpy(factors)).numpy())


def test_quantised_tensors_are_dequantised(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    write_gguf(path, read_config(checkpoint), checkpoint, quantization=gguf.GGMLQuantizationType.BF16)
    name = "model.layers.1.self_attn.q_proj.weight"
    wanted = open_weights(checkpoint).tensor(name).bfloat16().float().numpy()
    np.testing.assert_array_equal(GGUFFile(path).tensor(name), wanted)


def test_the_tokenizer_cuts_and_merges_as_the_file_says(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link_gguf(made, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode("the  12<|im_end|><think>x").tokens
    assert tokens == ["the", "Ġ", "Ġ", "1", "2", "<|im_end|>", "<think>", "x"]
    assert tokenizer.decode(tokenizer.encode("the 12").ids) == "the 12"
    assert "im_start" in (folder / "chat_template.jinja").read_text()
    assert '"eos_token_id": 2' in (folder / "generation_config.json").read_text()


def test_an_unknown_cut_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", read_config(checkpoint), checkpoint, pre_tokenizer="unheard-of")
    with pytest.raises(ConfigurationError, match="unheard-of"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path)


def test_another_architecture_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "falcon.gguf", read_config(checkpoint), checkpoint, architecture="falcon")
    with pytest.raises(ConfigurationError, match="falcon"):
        GGUFFile(tmp_path / "falcon.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1000])
def test_a_cut_file_is_refused(made: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(made.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match="cut.gguf"):
        GGUFFile(cut)
