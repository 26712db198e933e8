import pytest

from orchestrator.config import parse_config
from pronghorn.errors import ConfigurationError

LEAST: dict[str, object] = {
    "redis_url": "redis://h",
    "key_prefix": "p",
    "model_name": "m",
    "model_path": "/m",
    "max_length": 2048,
}


def test_the_least_that_is_needed_is_enough() -> None:
    config = parse_config(LEAST)
    assert (config.default_deadline_s, config.max_attempts, config.max_request_bytes) == (600.0, 3, 104_857_600)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_in_flight", 0, "max_in_flight"),
        ("max_queue", -1, "max_queue"),
        ("heartbeat_timeout_s", "soon", "heartbeat_timeout_s"),
        ("reconnect_max_s", 0.01, "reconnect_max_s"),
        ("colour", "red", "colour"),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse_config({**LEAST, field: value})
