from kvcache.connector import MAX_HINT_INSTANCES, HintOutcome, read_hint
from kvcache.hashing import BlockHash
from orchestrator.hints import routed_hint
from pronghorn.ids import NodeName

HASHES = [BlockHash(bytes([i]) * 32) for i in range(1, 5)]
CLIENTS = {"version": 1, "instances": [{"name": "other", "blocks": 2, "last_hash": "0" * 64}]}


def name_of(block_hash: BlockHash) -> str:
    return block_hash.hex()


def test_holders_are_named_with_how_much_they_hold_and_the_hash_it_ends_with() -> None:
    hint = routed_hint([(NodeName("decode-1"), 3), (NodeName("prefill-1"), 1)], HASHES, name_of, None)
    outcome, read = read_hint(hint)
    assert outcome is HintOutcome.USABLE and read is not None
    told = [(instance.name, instance.blocks, instance.last_hash) for instance in read.instances]
    assert told == [("decode-1", 3, HASHES[2].hex()), ("prefill-1", 1, HASHES[0].hex())]


def test_what_the_client_names_beyond_that_follows() -> None:
    hint = routed_hint([(NodeName("decode-1"), 3)], HASHES, name_of, CLIENTS)
    assert hint is not None and [instance["name"] for instance in hint["instances"]] == ["decode-1", "other"]
    hint = routed_hint([(NodeName("other"), 3)], HASHES, name_of, CLIENTS)
    assert hint is not None and [instance["blocks"] for instance in hint["instances"]] == [3]


def test_where_nothing_is_known_the_clients_own_hint_goes_on_as_it_came() -> None:
    assert routed_hint([], HASHES, name_of, None) is None
    assert routed_hint([], HASHES, name_of, {"nonsense": 1}) == {"nonsense": 1}
    hint = routed_hint([(NodeName("decode-1"), 3)], HASHES, name_of, {"nonsense": 1})
    assert hint is not None and len(hint["instances"]) == 1


def test_a_hint_has_no_more_holders_than_its_reader_takes() -> None:
    many = [(NodeName(f"decode-{i}"), 1) for i in range(MAX_HINT_INSTANCES + 5)]
    hint = routed_hint(many, HASHES, name_of, CLIENTS)
    assert read_hint(hint)[0] is HintOutcome.USABLE
