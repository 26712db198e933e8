"""`--device cuda` and machines other than the head, on a Ray cluster of our own with GPUs that are not there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.chaos.machines import machines
from tests.fakes.running_cluster import ROOT

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def service(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return {
        "model_path": str(tmp_path),
        "model_name": "tiny",
        "redis_url": "redis://127.0.0.1",
        "key_prefix": "k",
        "device": "cuda",
    }


def test_each_node_has_a_gpu_of_its_own_and_an_address_of_its_machine(service: dict[str, Any]) -> None:
    with machines("gpus", gpus=(2, 1), settings={"PYTHONPATH": str(ROOT)}) as ray:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fakes.gpu_nodes", ray.address, json.dumps(service), "3"],
            env=ray.environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    places = sorted((standing["address"].rsplit(":", 1)[0], standing["gpu"]) for standing in found)
    assert places == [("127.0.0.2", "0"), ("127.0.0.2", "1"), ("127.0.0.3", "0")]
