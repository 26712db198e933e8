from typing import Any

import msgspec
import pytest

from cluster import config
from cluster.config import ClusterConfig, ServiceConfig
from cluster.config_problems import Refused
from cluster.config_sources import Settings, Value
from cluster.model_config import ModelConfig, pool

SHARED: dict[str, Any] = {"model_path": "", "model_name": "", "redis_url": "r", "key_prefix": "k"}


def service(models: dict[str, Any], **changes: Any) -> ServiceConfig:
    return config.parse({**SHARED, "models": models, **changes}, ServiceConfig)


def problems(models: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(Refused) as refused:
        service(models, **changes)
    return refused.value.message


def test_a_model_has_its_own_settings_and_otherwise_the_shared_ones() -> None:
    both = service({"a": {"path": "/a", "decode": 3, "dtype": "bfloat16"}, "b": {"path": "/b"}}, decode=2, prefill=0)
    a, b = both.each
    assert (a.model_name, a.model_path, a.decode, a.prefill, a.dtype) == ("a", "/a", 3, 0, "bfloat16")
    assert (b.model_name, b.model_path, b.decode, b.prefill, b.dtype) == ("b", "/b", 2, 0, "float32")
    assert a.models == b.models == {}
    assert (a.redis_url, a.key_prefix) == ("r", "k")


def test_of_a_model_without_a_mapping_of_models_the_service_is_its_own() -> None:
    alone = config.parse({**SHARED, "model_path": "/a", "model_name": "a"}, ServiceConfig)
    assert alone.each == [alone]


def test_settings_by_name_and_places_come_together() -> None:
    (a,) = service(
        {"a": {"path": "/a", "engine_settings": {"x": 1}, "placement": {"decode": {"labels": {"p": "q"}}}}},
        engine_settings={"x": 0, "y": 2},
        placement={"prefill": {"max_per_machine": 1}},
    ).each
    assert a.engine_settings == {"x": 1, "y": 2}
    assert a.placement.prefill.max_per_machine == 1
    assert a.placement.decode.labels == {"p": "q"}


def test_what_a_model_may_have_of_its_own_is_a_setting_of_the_service() -> None:
    shared = {field.name for field in msgspec.structs.fields(ServiceConfig)}
    assert {field.name for field in msgspec.structs.fields(ModelConfig)} - shared == {"path"}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a": {}}, "models.a.path is missing"),
        ({"a": {"path": ""}}, "models.a.path is ''; it must be a Hugging Face folder, GGUF file or hub name"),
        ({"a": "/a"}, "models.a is '/a'; it must be settings by name, path among them"),
        ({"a": {"path": "/a", "decode": 0}}, "models.a.decode is 0; it must be `int` >= 1"),
        ({"a": {"path": "/a", "prefill": -1}}, "models.a.prefill is -1"),
        ({"a": {"path": "/a", "decoed": 1}}, "models.a.decoed is not known; did you mean decode?"),
        ({"a": {"path": "/a", "dtype": "int4"}}, "models.a.dtype is 'int4'; it must be one of float32, bfloat16"),
        ({"a": {"path": "/a", "policy": "best"}}, "models.a.policy is 'best'; it must be one of kv_aware"),
        ({"a": {"path": "/a", "placement": {"orchestrator": {}}}}, "models.a.placement.orchestrator is not known"),
        ({"a b": {"path": "/a"}}, "models has 'a b'; a model's name must be 1 to 64 letters"),
        ({"a/b": {"path": "/a"}, "A-b": {"path": "/b"}}, "models has 'a/b' and 'A-b', whose pools would both"),
    ],
)
def test_a_problem_of_one_model_is_told_by_path_and_value(models: dict[str, Any], said: str) -> None:
    assert said.replace("`", "") in problems(models)


def test_every_problem_of_every_model_is_told_at_once() -> None:
    models = {"a": {"path": "/a", "decode": 0}, "b": {"path": "/b", "policy": "best"}}
    said = problems(models, policy="worst").splitlines()
    assert [line.split(" ")[0] for line in said] == ["models.a.decode", "policy", "models.b.policy"]


def test_a_shared_problem_is_told_once() -> None:
    assert problems({"a": {"path": "/a"}, "b": {"path": "/b"}}, policy="worst").count("worst") == 1


@pytest.mark.parametrize("field", ["model_path", "model_name"])
def test_one_model_and_several_are_not_given_together(field: str) -> None:
    assert f"{field} is '/x'; it must be left out" in problems({"a": {"path": "/a"}}, **{field: "/x"})


def test_the_model_of_a_cluster_stands_in_one_place() -> None:
    with pytest.raises(Refused, match=r"model is '/x' beside service\.models"):
        config.parse({"model": "/x", "service": {**SHARED, "models": {"a": {"path": "/a"}}}}, ClusterConfig)


def test_models_come_from_every_source_and_their_names_may_have_dots(tmp_path: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("service:\n  models:\n    qwen2.5: {path: /q, kv_memory_bytes: 1GiB}\n    org/b: {path: /b}\n")
    flags = {("service", "models", "qwen2.5", "decode"): Value(2, "--x")}
    found = Settings(str(file), {}, flags).config().service
    assert [(one.model_name, one.decode) for one in found.each] == [("qwen2.5", 2), ("org/b", 1)]
    assert found.each[0].kv_memory_bytes == 1 << 30


def test_the_source_of_a_models_problem_is_named(tmp_path: Any) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("service: {models: {a: {path: /a, decode: 0}}}\n")
    with pytest.raises(Refused, match=r"service\.models\.a\.decode is 0; .* \(from .*c\.yaml\)"):
        Settings(str(file), {}, {}).config()


def test_pools_of_several_models_are_told_apart_by_name() -> None:
    assert pool("decode", None) == "decode"
    assert pool("decode", "Qwen/Qwen2.5-0.5B") == "decode-qwen-qwen2-5-0-5b"
