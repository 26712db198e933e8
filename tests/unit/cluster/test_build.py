import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from pronghorn.wire import GRPC_ENVIRONMENT

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


def test_every_replica_takes_something_since_ray_neither_spreads_nor_packs_what_takes_nothing(
    args: dict[str, Any],
) -> None:
    for deployment in deployments(args).values():
        assert any(deployment._replica_config.resource_dict.values()), deployment.name


def test_every_replica_starts_in_the_environment_in_which_grpc_moves_blocks(args: dict[str, Any]) -> None:
    for deployment in deployments(args).values():
        assert deployment.ray_actor_options["runtime_env"]["env_vars"] == GRPC_ENVIRONMENT, deployment.name


def test_where_places_are_counted_the_old_replica_goes_before_the_new_one_comes(args: dict[str, Any]) -> None:
    built = deployments({**args, "placement": {"decode": {"max_per_machine": 1}}})
    surge = {name: deployment._deployment_config.max_surge_percent for name, deployment in built.items()}
    assert surge == {"decode": 0, "prefill": 1, "orchestrator": 1}


def test_each_model_has_pools_and_is_told_to_the_one_orchestrator(args: dict[str, Any]) -> None:
    path = args["model_path"]
    models = {
        "a": {"path": path, "decode": 2, "max_length": 64},
        "b": {"path": path, "prefill": 0, "dtype": "bfloat16"},
    }
    built = deployments({**args, "model_path": "", "model_name": "", "models": models, "max_in_flight": 8})
    assert {name: built[name].num_replicas for name in built if name != "orchestrator"} == {
        "decode-a": 2,
        "prefill-a": 1,
        "decode-b": 1,
    }
    engines = {name: built[name].init_args[0]["node"]["engine"] for name in built if name != "orchestrator"}
    assert [engines[name]["model_name"] for name in ("decode-a", "prefill-a", "decode-b")] == ["a", "a", "b"]
    assert (engines["decode-a"]["max_length"], engines["decode-b"]["dtype"]) == (64, "bfloat16")
    told = built["orchestrator"].init_args[0]
    assert [(one["model_name"], one["max_length"], one["prefill_expected"]) for one in told] == [
        ("a", 64, True),
        ("b", 512, False),
    ]
    assert built["orchestrator"].max_ongoing_requests == 2 * (8 + 1024 + build.REFUSING)
