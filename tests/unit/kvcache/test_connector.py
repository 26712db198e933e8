import pytest

from kvcache.connector import HintOutcome, NullConnector, parse_hint, read_hint
from kvcache.hashing import BlockHash
from pronghorn.counters import Counters

GOOD = {"version": 1, "instances": [{"name": "decode-1", "blocks": 3, "last_hash": "ab" * 32}]}


def instance(**fields):
    return {"version": 1, "instances": [GOOD["instances"][0] | fields]}


UNUSABLE = [
    (None, HintOutcome.ABSENT),
    ({}, HintOutcome.MALFORMED),
    ({"version": 2, "instances": GOOD["instances"]}, HintOutcome.WRONG_VERSION),
    ({"version": 2, "groups": []}, HintOutcome.WRONG_VERSION),
    ({"instances": []}, HintOutcome.MALFORMED),
    ({"version": "1", "instances": []}, HintOutcome.MALFORMED),
    ({"version": True, "instances": []}, HintOutcome.MALFORMED),
    ({"version": 1, "instances": "decode-1"}, HintOutcome.MALFORMED),
    ({"version": 1, "instances": GOOD["instances"] * 65}, HintOutcome.MALFORMED),
    (instance(blocks=-1), HintOutcome.MALFORMED),
    (instance(last_hash="AB"), HintOutcome.MALFORMED),
    (instance(name=""), HintOutcome.MALFORMED),
    ("a string", HintOutcome.MALFORMED),
    (instance(name="decode-9"), HintOutcome.UNKNOWN_INSTANCE),
    ({"version": 1, "instances": []}, HintOutcome.UNKNOWN_INSTANCE),
]


@pytest.mark.conformance(38)
@pytest.mark.parametrize(("metadata", "outcome"), UNUSABLE)
def test_an_unusable_hint_says_why_and_raises_nothing(metadata, outcome):
    assert read_hint(metadata, {"decode-1"}) == (outcome, None)


def test_a_usable_hint_keeps_only_registered_instances():
    metadata = {"version": 1, "instances": [*GOOD["instances"], GOOD["instances"][0] | {"name": "stranger"}]}
    outcome, hint = read_hint(metadata, {"decode-1"})
    assert outcome is HintOutcome.USABLE
    assert [(i.name, i.blocks) for i in hint.instances] == [("decode-1", 3)]


def test_the_shape_alone_can_be_asked_for():
    assert parse_hint(GOOD).instances[0].last_hash == "ab" * 32
    assert parse_hint({"version": 3}) is None


@pytest.mark.conformance(38)
@pytest.mark.parametrize(("metadata", "outcome"), [*UNUSABLE, (GOOD, "no_connector")])
async def test_the_null_connector_finds_nothing_and_counts_each_hint(metadata, outcome):
    counters = Counters()
    connector = NullConnector(counters, lambda: {"decode-1"})
    assert not connector.may_have(metadata)
    assert (await connector.lookup([BlockHash(bytes(32))], 0, metadata)).blocks == 0
    expected = {} if outcome is HintOutcome.ABSENT else {f"cache_hint_miss.{outcome}": 1}
    assert counters.snapshot() == expected
