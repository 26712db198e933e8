from pathlib import Path

import pytest

from cluster.config_problems import Refused
from cluster.config_sources import Place, Settings, Value, variable, written
from pronghorn.errors import ConfigurationError

YAML = """
name: mine
port: 9000
service:
  prefill: 2
  decode: 3
  kv_memory_bytes: 1GiB
  engine_settings: {max_waiting: 7}
  placement:
    decode: {labels: {pronghorn.io/pool: decode}, max_per_machine: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "pronghorn.yaml"
    path.write_text(YAML)
    return str(path)


def settings(file: str | None = None, flags: dict[Place, Value] | None = None, **environ: str) -> Settings:
    return Settings(file, environ, flags or {})


def sources(found: Settings) -> dict[str, tuple[object, str]]:
    return {row.path: (row.value, Path(row.source).name) for row in found.rows()}


def test_nothing_at_all_is_a_cluster_of_the_default_model() -> None:
    found = settings().config()
    assert (found.name, found.service.model_name, found.service.key_prefix, found.own_redis) == (
        "default",
        "smollm2-135m-instruct",
        "pronghorn:default",
        True,
    )


def test_flags_win_over_the_environment_and_that_over_the_file(file: str) -> None:
    flags = {("service", "decode"): Value(5, "--decode")}
    found = settings(file, flags, PRONGHORN_SERVICE__DECODE="4", PRONGHORN_SERVICE__PREFILL="1")
    service = found.config().service
    assert (service.decode, service.prefill, service.kv_memory_bytes) == (5, 1, 2**30)
    told = sources(found)
    assert told["service.decode"] == (5, "--decode")
    assert told["service.prefill"] == (1, "PRONGHORN_SERVICE__PREFILL")
    assert told["port"] == (9000, "pronghorn.yaml")
    assert told["service.block_tokens"] == (16, "default")
    assert told["service.key_prefix"] == ("pronghorn:mine", "what else is set")


def test_a_toml_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pronghorn.toml"
    path.write_text('name = "mine"\n[service.placement.decode]\nlabels = {"a.b/c" = "d"}\nmax_per_machine = 2\n')
    decode = settings(PRONGHORN_CONFIG=str(path)).config().service.placement.decode
    assert (decode.labels, decode.max_per_machine) == ({"a.b/c": "d"}, 2)


def test_settings_by_name_of_several_sources_come_together(file: str) -> None:
    flags = {("service", "engine_settings", "scheduling_strategy"): Value("balanced", "--set")}
    found = settings(file, flags).config().service
    assert found.engine_settings == {"max_waiting": 7, "scheduling_strategy": "balanced"}
    assert found.placement.decode.labels == {"pronghorn.io/pool": "decode"}


def test_any_setting_can_be_a_variable_or_an_option() -> None:
    place, value = written("service.placement.decode.labels.pronghorn.io/pool=decode")
    assert (place, value.value) == (("service", "placement", "decode", "labels", "pronghorn.io/pool"), "decode")
    assert written("service.placement.decode.labels.machine=2")[1].value == "2"
    assert written("service.placement.decode.resources.fast=2")[1].value == 2
    assert variable(("service", "kv_memory_bytes")) == "PRONGHORN_SERVICE__KV_MEMORY_BYTES"
    environ = {
        "PRONGHORN_NAME": "7",  # a name of digits stays a name
        "PRONGHORN_SERVICE__PREFIX_CACHING": "false",
        "PRONGHORN_SERVICE__KV_MEMORY_BYTES": "64MiB",
        "PRONGHORN_SERVICE__PLACEMENT__DECODE__RESOURCES": '{"fast": 0.5}',
    }
    found = settings(None, {place: value}, **environ).config()
    assert (found.name, found.service.prefix_caching, found.service.kv_memory_bytes) == ("7", False, 64 << 20)
    assert found.service.placement.decode.resources == {"fast": 0.5}


def test_every_problem_is_told_with_where_it_comes_from(file: str) -> None:
    flags = {("service", "policy"): Value("magic", "--policy")}
    wrong = settings(file, flags, PRONGHORN_PORT="70000", PRONGHORN_SERVICE__DECOD="2")
    with pytest.raises(Refused) as refused:
        wrong.config()
    assert refused.value.message.splitlines() == [
        "service.decod is not known; did you mean decode? (from PRONGHORN_SERVICE__DECOD)",
        "port is 70000; it must be int <= 65535 (from PRONGHORN_PORT)",
        refused.value.problems[2].text,
    ]
    assert refused.value.problems[2].text.startswith("policy is 'magic'; it must be one of ")
    assert refused.value.problems[2].text.endswith("(from --policy)")


def test_a_branch_that_is_a_value_is_the_mistake_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("service: fast\n")
    with pytest.raises(Refused, match="service is 'fast'; it must be object"):
        settings(str(path), {("service", "decode"): Value(1, "--decode")}).config()


def test_a_size_that_is_none_is_told_as_a_size() -> None:
    with pytest.raises(Refused, match="kv_memory_bytes is '1 GB'; it must be a size as 512MiB"):
        settings(PRONGHORN_SERVICE__KV_MEMORY_BYTES="1 GB").config()


def test_redis_url_of_the_environment_is_used_and_its_password_is_not_shown() -> None:
    found = settings(REDIS_URL="redis://:secret@r:1/0")
    assert found.config().service.redis_url == "redis://:secret@r:1/0"
    assert sources(found)["service.redis_url"] == ("redis://r:1/0", "REDIS_URL")


def test_variables_that_are_no_settings_are_left_alone() -> None:
    settings(
        PRONGHORN_HOME="/h",
        PRONGHORN_CACHE="/c",
        PRONGHORN_RUN="r",
        PRONGHORN_SERVICE_HOST="10.0.0.1",
        PRONGHORN_SERVICE_PORT_HTTP="8000",
        PRONGHORN_PORT="tcp://10.0.0.1:8000",
        PRONGHORN_PORT_8000_TCP_ADDR="10.0.0.1",
        PRONGHORN_HEAD_SVC_SERVICE_HOST="10.0.0.2",
    ).config()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [", "a.yaml: "),
        ("a.yaml", "port: 1\nport: 2\n", "port is there twice"),
        ("a.yaml", "- 1\n", "holds list"),
        ("a.toml", "port = ", "a.toml: "),
        ("a.json", "{}", "neither .yaml nor .toml"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        settings(str(tmp_path / name))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"/no/where\.yaml, which cannot be read"):
        settings("/no/where.yaml")
