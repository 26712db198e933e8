import msgspec
import pytest

from cluster import flags
from cluster.config import ClusterConfig
from cluster.config_problems import struct_of
from cluster.config_sources import Settings
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
