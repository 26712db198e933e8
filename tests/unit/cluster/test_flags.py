from pathlib import Path

import msgspec
import pytest

from cluster import flags
from cluster.config import ClusterConfig
from cluster.config_problems import struct_of
from cluster.config_sources import Settings, Value
from pronghorn.errors import ConfigurationError


@pytest.mark.parametrize("flag", flags.FLAGS, ids=lambda flag: flag.name)
def test_every_flag_sets_something_that_there_is(flag: flags.Flag) -> None:
    kind = ClusterConfig
    for part in flag.path.split("."):
        struct = struct_of(kind)
        assert struct is not None
        kind = {field.name: field.type for field in msgspec.structs.fields(struct)}[part]


def test_what_is_given_is_what_is_set() -> None:
    given = {"decode": 3, "kv_memory": "1GiB", "prefix_caching": False, "prefill": None, "set": ["max_waiting=7"]}
    found = Settings(None, {}, flags.values({**given, "option": ["service.max_in_flight=9"]})).config().service
    assert (found.decode, found.prefill, found.kv_memory_bytes, found.prefix_caching) == (3, 1, 2**30, False)
    assert (found.engine_settings, found.max_in_flight) == ({"max_waiting": 7}, 9)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"kv_memory": "1 GB"}, "--kv-memory"), ({"set": ["x"]}, "--set"), ({"option": ["decode"]}, "--option")],
)
def test_a_flag_that_cannot_be_read_is_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        flags.values(given)


def models(*specs: str) -> dict[str, str]:
    service = Settings(None, {}, flags.values({"model": list(specs)})).config().service
    return {name: model.path for name, model in service.models.items()}


def test_one_model_without_a_name_is_the_clusters() -> None:
    found = Settings(None, {}, flags.values({"model": ["/m/smol"]})).config()
    assert (found.model, found.service.model_name, found.service.models) == ("/m/smol", "smol", {})


def test_several_models_have_the_names_that_they_were_given_or_that_of_their_path() -> None:
    assert models("a=/m/one", "/m/two") == {"a": "/m/one", "two": "/m/two"}
    assert models("a=/m/one") == {"a": "/m/one"}


def test_a_folder_whose_name_has_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    spec = str(tmp_path / "a=b")
    assert flags.values({"model": [spec]}) == {("model",): Value(spec, "--model")}


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--model names 'a' twice, for /m/one and for /n/a"):
        flags.values({"model": ["a=/m/one", "/n/a"]})


def test_a_models_setting_may_be_an_option() -> None:
    given = {"model": ["qwen2.5=/q", "b=/b"], "option": ["service.models.qwen2.5.placement.decode.max_per_machine=2"]}
    first, _ = Settings(None, {}, flags.values(given)).config().service.each
    assert (first.model_name, first.placement.decode.max_per_machine) == ("qwen2.5", 2)
