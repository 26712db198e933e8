from typing import Any

import pytest

from decode_nodes.config import DecodeNodeConfig
from pipelines.node.config import parse_config
from pronghorn.errors import ConfigurationError

ENGINE = {"model_path": "/model", "model_name": "m", "num_blocks": 8}


def node(**changes: Any) -> dict[str, Any]:
    return {"node": {"engine": ENGINE, "redis_url": "redis://127.0.0.1", "key_prefix": "p", **changes}}


def test_plain_data_becomes_a_config_with_defaults() -> None:
    config = parse_config(node(), DecodeNodeConfig)
    assert config.node.dial_host == "127.0.0.1" and config.node.port == 0
    assert config.stall_timeout_s == 1.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": "0.0.0.0"}, "advertise_host"),
        ({"lease_s": 0}, "lease_s"),
        ({"max_in_flight": "many"}, "max_in_flight"),
        ({"colour": "red"}, "colour"),
        ({"connections_per_node": 0}, "connections_per_node"),
        ({"tls": {"cert": "/c", "key": "/k"}}, "ca"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_config(node(**changes), DecodeNodeConfig)


def test_every_interface_needs_an_address_that_others_can_dial() -> None:
    config = parse_config(node(host="0.0.0.0", advertise_host="10.0.0.7"), DecodeNodeConfig)
    assert config.node.dial_host == "10.0.0.7"


@pytest.mark.parametrize(("machine", "dialled"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_a_host_left_open_is_the_machines_address(machine: str, dialled: str) -> None:
    config = parse_config(node(host=None), DecodeNodeConfig)
    placed = config.node.placed(lambda: machine)
    assert (placed.bind_host, placed.dial_host) == (dialled, dialled)


def test_a_host_that_was_named_stays() -> None:
    config = parse_config(node(host="127.0.0.9"), DecodeNodeConfig)
    assert config.node.placed(lambda: "10.0.0.7").dial_host == "127.0.0.9"


POOL_BYTES = 1000


@pytest.mark.parametrize(
    ("changes", "tiers"),
    [
        ({}, (0, 0)),
        ({"host_offload_bytes": 7}, (7, 0)),
        ({"disk_offload_bytes": 9, "disk_offload_dir": "/d"}, (0, 9)),
        ({"host_offload_bytes": 7, "disk_offload_bytes": 0}, (7, 0)),
        ({"kv_connector": "local"}, (1500, 0)),
        ({"kv_connector": "local", "host_offload_bytes": 7}, (7, 0)),
        ({"kv_connector": "tiered", "disk_offload_dir": "/d"}, (1500, 2000)),
        ({"kv_connector": "tiered", "disk_offload_bytes": 0}, (1500, 0)),
        ({"kv_connector": "null", "host_offload_bytes": 0}, (0, 0)),
    ],
)
def test_a_node_has_the_tiers_that_its_budgets_say(changes: dict[str, Any], tiers: tuple[int, int]) -> None:
    assert parse_config(node(**changes), DecodeNodeConfig).node.tier_bytes(POOL_BYTES) == tiers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host_offload_bytes": -1}, "host_offload_bytes: -1 is below 0"),
        ({"kv_connector": "null", "host_offload_bytes": 7}, "host_offload_bytes: 7 .*'null'"),
        ({"kv_connector": "null", "disk_offload_bytes": 9}, "disk_offload_bytes: 9 .*'null'"),
        ({"kv_connector": "local", "disk_offload_bytes": 9}, "disk_offload_bytes: 9 .*'local'"),
        ({"kv_connector": "local", "disk_offload_dir": "/d"}, "disk_offload_dir: /d .*'local'"),
        ({"kv_connector": "tiered"}, "disk_offload_dir: needed"),
        ({"disk_offload_bytes": 9}, "disk_offload_dir: needed"),
        ({"disk_offload_dir": "/d"}, "disk_offload_bytes: needed"),
    ],
)
def test_budgets_that_could_not_be_heeded_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_config(node(**changes), DecodeNodeConfig)
