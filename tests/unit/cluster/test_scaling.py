import pytest

from cluster import config
from cluster.config import ServiceConfig
from cluster.scaling import sizes
from pronghorn.errors import ConfigurationError

SHARED = {"redis_url": "r", "key_prefix": "k"}
ONE = config.parse({**SHARED, "model_path": "/m", "model_name": "m"}, ServiceConfig)
TWO = config.parse(
    {**SHARED, "model_path": "", "model_name": "", "models": {"a": {"path": "/a"}, "b": {"path": "/b"}}}, ServiceConfig
)


def test_the_pools_are_those_of_the_named_model() -> None:
    assert sizes(ONE, None, {"decode": 2}, 3) == {"decode": 2, "orchestrator": 3}
    assert sizes(ONE, "m", {"decode": 2}, None) == {"decode": 2}
    assert sizes(TWO, "b", {"decode": 2, "prefill": 1}, None) == {"decode-b": 2, "prefill-b": 1}
    assert sizes(TWO, None, {}, 2) == {"orchestrator": 2}


def test_of_several_models_one_must_be_named_and_be_there() -> None:
    with pytest.raises(ConfigurationError, match="serves a, b; say which with --model"):
        sizes(TWO, None, {"decode": 2}, None)
    with pytest.raises(ConfigurationError, match="serves no 'c'; it serves a, b"):
        sizes(TWO, "c", {"decode": 2}, None)
