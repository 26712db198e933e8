import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.models.config import read_config
from pipelines.models.weights import INDEX_FILE, check_weights, expected_names, open_weights
from pronghorn.errors import ConfigurationError
from tests.fakes.tiny_models import SHAPES, tiny_model


@pytest.mark.parametrize("shape", SHAPES)
def test_every_expected_tensor_is_in_the_checkpoint_and_no_other(shape: str, tmp_path: Path) -> None:
    tiny_model(shape, tmp_path)
    config = read_config(tmp_path)
    check_weights(tmp_path, config)
    assert set(expected_names(config)) == open_weights(tmp_path).names()


def test_several_files_read_as_one(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{number}.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    weights = open_weights(tmp_path)
    assert weights.names() == set(names)
    for name in names:
        assert torch.equal(weights.tensor(name), tensors[name])
    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="part1"):
        open_weights(tmp_path)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    name = "model.embed_tokens.weight"
    first, second = open_weights(tmp_path).tensor(name), open_weights(tmp_path).tensor(name)
    assert torch.equal(first, second)
    with pytest.raises(ConfigurationError, match="no tensor nothing"):
        open_weights(tmp_path).tensor("nothing")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ConfigurationError, match="damaged"):
        open_weights(tmp_path)
