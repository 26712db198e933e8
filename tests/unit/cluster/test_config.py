import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster import config
from cluster.config import ClusterConfig, ServiceConfig
from decode_nodes.config import DecodeNodeConfig
from orchestrator.config import parse_config as parse_orchestrator
from pipelines.node.config import parse_config as parse_node
from prefill_nodes.config import PrefillNodeConfig
from pronghorn.errors import ConfigurationError
from tests.fakes.certificates import Authority

BLOCK_BYTES = 2 * 2 * 1 * 16 * 8 * 4  # layers, keys and values, heads, tokens, dim, float32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def service(model: Path, **changes: Any) -> ServiceConfig:
    fixed: dict[str, Any] = {
        "model_path": str(model),
        "model_name": "tiny",
        "redis_url": "redis://r",
        "key_prefix": "k",
    }
    return config.parse({**fixed, **changes}, ServiceConfig)


def cluster(model: Path, **changes: Any) -> ClusterConfig:
    fixed = {"name": "c", "service": msgspec.to_builtins(service(model))}
    return config.parse({**fixed, **changes}, ClusterConfig)


def test_blocks_are_what_the_memory_holds(model: Path) -> None:
    assert config.num_blocks(service(model, kv_memory_bytes=100 * BLOCK_BYTES + 1)) == 100


def test_replicas_share_memory_and_threads(model: Path) -> None:
    shared = config.engine(service(model, kv_memory_bytes=100 * BLOCK_BYTES, threads=4, data_parallel=2))
    assert (shared["num_blocks"], shared["threads"], shared["data_parallel"]) == (50, 2, 2)


def test_a_policy_of_the_engines_can_be_set_by_name(model: Path) -> None:
    chosen = dict([config.parse_setting("scheduling_strategy=balanced"), config.parse_setting("max_waiting=7")])
    settings = config.engine(service(model, kv_memory_bytes=100 * BLOCK_BYTES, engine_settings=chosen))
    assert (settings["scheduling_strategy"], settings["max_waiting"]) == ("balanced", 7)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("tensor_parallel=2", "tensor parallelism is not supported: tensor_parallel is 2"),
        ("lora=/adapters", "LoRA is not supported: lora is '/adapters'"),
        ("speculative=/draft", "speculative decoding is not supported"),
        ("scheduling_strategy=magic", "scheduling_strategy"),
        ("max_waiting=0", "max_waiting"),
        ("no_such_thing=1", "no_such_thing"),
        ("num_blocks=1", "num_blocks has an option of its own"),
    ],
)
def test_a_setting_that_no_engine_takes_is_refused_by_name(model: Path, setting: str, named: str) -> None:
    asked = service(model, kv_memory_bytes=100 * BLOCK_BYTES, engine_settings=dict([config.parse_setting(setting)]))
    with pytest.raises(ConfigurationError, match=named):
        config.engine(asked)


def test_too_little_memory_is_refused_with_both_numbers(model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"0\.0 MiB, room for 1 blocks a replica; at least 8"):
        config.num_blocks(service(model, kv_memory_bytes=BLOCK_BYTES))


def test_no_request_may_be_longer_than_the_pool_or_the_model(model: Path) -> None:
    assert config.max_length(service(model, kv_memory_bytes=10 * BLOCK_BYTES)) == 160
    assert config.max_length(service(model, kv_memory_bytes=1000 * BLOCK_BYTES)) == 512
    assert config.max_length(service(model, max_length=100)) == 100
    with pytest.raises(ConfigurationError, match="513; the model knows 512"):
        config.max_length(service(model, max_length=513))


def test_what_each_room_is_told_is_what_it_takes(model: Path) -> None:
    told = service(model, decode=2, threads=2, drain_timeout_s=7.0, advertise_host="127.0.0.9")
    decode = parse_node({"node": config.node(told)}, DecodeNodeConfig)
    prefill = parse_node({"node": config.node(told)}, PrefillNodeConfig)
    orchestrator = parse_orchestrator(config.orchestrator(told))
    assert decode.node == prefill.node
    assert decode.node.engine.num_blocks == config.num_blocks(told)
    assert decode.node.engine.threads == 2
    assert decode.node.drain_timeout_s == orchestrator.drain_s == 7.0
    assert decode.node.placed(lambda: "10.0.0.7").dial_host == "127.0.0.9"
    assert decode.node.engine.max_length == orchestrator.max_length == 512


def test_a_batch_always_fits_in_a_step(model: Path) -> None:
    assert config.engine(service(model, chunk_tokens=4, max_batch_size=32))["max_batch_input_tokens"] == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [("decode", 0), ("prefill", -1), ("threads", 0), ("kv_memory_bytes", 0), ("deadline_s", -1.0), ("dtype", "int3")],
)
def test_a_wrong_value_is_refused_by_name(model: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=field):
        service(model, **{field: value})


def test_an_unknown_field_is_refused(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="replica"):
        service(model, replica=3)


def test_joining_a_ray_cluster_needs_a_redis_that_all_its_hosts_reach(model: Path) -> None:
    assert cluster(model, address="auto").address == "auto"
    with pytest.raises(ConfigurationError, match="--redis-url"):
        cluster(model, address="auto", service=msgspec.to_builtins(service(model, redis_url="")))


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", "x" * 33])
def test_a_cluster_name_is_a_plain_folder_name(model: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cluster name"):
        cluster(model, name=name)


@pytest.mark.parametrize(
    ("text", "size"), [("12", 12), ("1KiB", 1024), ("1.5 GiB", 1536 * 2**20), ("512mib", 512 * 2**20)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert config.parse_bytes(text, "--kv-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "1 GB", "-1MiB", "1e3"])
def test_what_is_no_size_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--kv-memory"):
        config.parse_bytes(text, "--kv-memory")


def test_orchestrators_are_told_how_answers_are_read(model: Path) -> None:
    told = parse_orchestrator(config.orchestrator(service(model, tool_parser="mistral", structured_output=False)))
    assert (told.tool_parser, told.reasoning_parser, told.structured_output) == ("mistral", "auto", False)


@pytest.mark.parametrize("field", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_there_is_not_is_refused_before_anything_starts(model: Path, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is 'xml'; it must be auto, none"):
        service(model, **{field: "xml"})


@pytest.mark.conformance(34)
@pytest.mark.parametrize("where", [{"kv_cache_hash_algo": "ahash64"}, {"engine_settings": {"hash_algo": "ahash64"}}])
def test_salts_with_an_algorithm_that_cannot_honour_them_are_refused_at_start(model: Path, where: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        service(model, use_client_cache_salt=True, **where)
    assert refused.value.param == "use_client_cache_salt" and "ahash64" in refused.value.message
    assert config.engine(service(model, **where))["hash_algo"] == "ahash64"


@pytest.mark.conformance(32)
@pytest.mark.parametrize("seed", ["00", "zz" * 32, " " + "0" * 63])
def test_a_hash_seed_that_is_none_is_refused_without_repeating_it(model: Path, seed: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        service(model, kv_cache_hash_seed=seed)
    assert refused.value.param == "kv_cache_hash_seed" and seed not in refused.value.message


def test_everybody_is_told_the_same_of_hashes_and_salts(model: Path) -> None:
    told = service(model, kv_cache_hash_algo="sha256_64", kv_cache_hash_seed="ab" * 32, use_client_cache_salt=True)
    orchestrator, node = config.orchestrator(told), config.node(told)
    assert orchestrator["hash_algo"] == node["engine"]["hash_algo"] == "sha256_64"
    assert orchestrator["kv_cache_hash_seed"] == node["kv_cache_hash_seed"] == "ab" * 32
    assert orchestrator["use_client_cache_salt"]


def test_settings_of_nodes_are_passed_on_and_checked(model: Path) -> None:
    assert config.node(service(model, node_settings={"kv_connector": "local"}))["kv_connector"] == "local"
    for wrong in ({"kv_connector": "elsewhere"}, {"kv_connector": "tiered"}, {"host": "h"}, {"no_such": 1}):
        with pytest.raises(ConfigurationError):
            config.node(service(model, node_settings=wrong))


def test_nodes_and_orchestrators_are_told_the_same_tls_files(model: Path, tmp_path: Path) -> None:
    files = config.tls_in(str(_issued(tmp_path / "tls")))
    told = service(model, tls=files)
    for node in config.node(told), config.orchestrator(told):
        assert node["tls"] == files
    parse_node({"node": config.node(told)}, DecodeNodeConfig)
    parse_orchestrator(config.orchestrator(told))
    assert config.node(service(model))["tls"] is None


def _issued(folder: Path) -> Path:
    Authority("ours").issue(folder)
    return folder


def test_a_folder_without_usable_certificates_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tls.crt"):
        config.tls_in(str(tmp_path))


def test_nodes_share_memory_unless_something_forwards_their_ports(model: Path) -> None:
    assert config.node(service(model))["shared_memory"] is True
    assert config.node(service(model, shared_memory=False))["shared_memory"] is False
    assert config.node(service(model, advertise_host="127.0.0.9"))["shared_memory"] is False
