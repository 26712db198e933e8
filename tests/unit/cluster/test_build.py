import json
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray's modules warn of their own ways when they are imported
    warnings.simplefilter("ignore")
    from cluster import build

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
def args(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return {"model_path": str(tmp_path), "model_name": "tiny", "redis_url": "redis://r", "key_prefix": "k"}


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    ingress = build.app(args)._bound_deployment
    bound = [ingress, *(node._bound_deployment for node in ingress.init_args[1:])]
    return {deployment.name: deployment for deployment in bound}


def test_a_pool_is_placed_as_asked(args: dict[str, Any]) -> None:
    decode = {"labels": {"pool": "decode"}, "resources": {"fast": 0.5}, "max_per_machine": 2}
    built = deployments({**args, "placement": {"decode": decode, "orchestrator": {"labels": {"edge": "!no"}}}})
    options = built["decode"].ray_actor_options
    assert (options["label_selector"], options["resources"]) == ({"pool": "decode"}, {"fast": 0.5})
    assert built["decode"]._replica_config.max_replicas_per_node == 2
    assert built["orchestrator"].ray_actor_options["label_selector"] == {"edge": "!no"}
    prefill = built["prefill"]
    assert "label_selector" not in prefill.ray_actor_options
    assert prefill._replica_config.max_replicas_per_node is None


def test_where_places_are_counted_the_old_replica_goes_before_the_new_one_comes(args: dict[str, Any]) -> None:
    built = deployments({**args, "placement": {"decode": {"max_per_machine": 1}}})
    surge = {name: deployment._deployment_config.max_surge_percent for name, deployment in built.items()}
    assert surge == {"decode": 0, "prefill": 1, "orchestrator": 1}
