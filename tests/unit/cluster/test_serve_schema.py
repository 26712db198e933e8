import json
import warnings
from pathlib import Path

import msgspec
import pytest
import yaml

from cluster.config import ClusterConfig, ServiceConfig
from cluster.model_config import ModelConfig, ModelPlacement
from cluster.serve_schema import for_others
from cluster.setting_types import Placement, Placements

with warnings.catch_warnings():  # Ray's modules warn of their own ways when they are imported
    warnings.simplefilter("ignore")
    from ray.serve.schema import ServeDeploySchema

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
def config(tmp_path: Path) -> ClusterConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    service = ServiceConfig(
        model_path=str(tmp_path),
        model_name="tiny",
        redis_url="redis://:secret@r",
        key_prefix="k",
        decode=2,
        placement=Placements(decode=Placement(labels={"pool": "decode"}, max_per_machine=1)),
    )
    return ClusterConfig(service=service, host="0.0.0.0", port=8001)


def test_what_is_printed_is_what_serve_takes_and_what_builds(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = yaml.safe_dump(for_others(config))
    assert "secret" not in text
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = schema.applications
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 8001)
    assert application.import_path == f"{build.app.__module__}:{build.app.__name__}"
    monkeypatch.setenv("REDIS_URL", "redis://:secret@r")
    ingress = build.app(application.args)._bound_deployment
    told = {node._bound_deployment.name: node._bound_deployment for node in ingress.init_args[1:]}
    assert told["decode"].num_replicas == 2
    assert told["decode"].ray_actor_options["label_selector"] == {"pool": "decode"}
    assert told["decode"].init_args[0]["node"]["redis_url"] == "redis://:secret@r"


def test_a_url_without_a_password_is_printed(config: ClusterConfig) -> None:
    service = msgspec.structs.replace(config.service, redis_url="redis://r:1/0")
    (application,) = for_others(msgspec.structs.replace(config, service=service))["applications"]
    assert application["args"]["redis_url"] == "redis://r:1/0"


def test_several_models_are_printed_with_what_is_theirs_and_build(config: ClusterConfig, tmp_path: Path) -> None:
    models = {
        "a": ModelConfig(path=str(tmp_path), decode=3),
        "org/b": ModelConfig(path=str(tmp_path), placement=ModelPlacement(decode=Placement(max_per_machine=2))),
    }
    several = {"models": models, "model_path": "", "model_name": "", "redis_url": "redis://r:1/0"}
    service = msgspec.structs.replace(config.service, **several)
    text = yaml.safe_dump(for_others(msgspec.structs.replace(config, service=service)), sort_keys=False)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.args["models"] == {
        "a": {"path": str(tmp_path), "decode": 3},
        "org/b": {
            "path": str(tmp_path),
            "placement": {"decode": {"labels": {}, "resources": {}, "max_per_machine": 2}},
        },
    }
    ingress = build.app(application.args)._bound_deployment
    sizes = {bound.name: bound.num_replicas for node in ingress.init_args[1:] if (bound := node._bound_deployment)}
    assert sizes == {"decode-a": 3, "prefill-a": 1, "decode-org-b": 2, "prefill-org-b": 1}
