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
