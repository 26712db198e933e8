import msgspec
import pytest

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import RunStored
from pipelines.node import block_feed
from pipelines.node.block_feed import BlockFeed, events_of
from pipelines.types import wire
from pipelines.types.frames import BlockEvents, BlocksRemoved, BlocksStored, NodeFrame

A, B, C, D, E = (BlockHash(letter.encode() * 32) for letter in "ABCDE")


def key(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "little")


def test_a_session_begins_with_everything_that_is_cached_and_goes_on_with_each_change() -> None:
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A])])
    assert feed.take(contents, {}) == BlockEvents(1, [BlocksStored(None, A[:8])], snapshot=True)
    assert feed.take(contents, {}) is None and feed.idle
    feed.add(events_of([RunStored(A, [B])]))
    assert feed.take(contents, {}) == BlockEvents(2, [BlocksStored(key(A), B[:8])])


def test_a_node_without_cached_blocks_says_so() -> None:
    assert BlockFeed().take(CacheContents(), {}) == BlockEvents(1, [], snapshot=True)


def test_a_long_snapshot_comes_in_frames_and_changes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "KEYS_PER_FRAME", 1)
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A, B])])
    first = feed.take(contents, {})
    assert first is not None and (first.snapshot, first.more) == (True, True)
    contents.apply([RunStored(B, [C])])
    feed.add(events_of([RunStored(B, [C])]))
    second, third = feed.take(contents, {}), feed.take(contents, {})
    assert second == BlockEvents(2, [BlocksStored(key(A), B[:8])])
    assert third == BlockEvents(3, [BlocksStored(key(B), C[:8])])


def test_a_reader_that_is_too_slow_gets_a_snapshot_in_place_of_what_it_missed() -> None:
    contents, feed = CacheContents(), BlockFeed(max_waiting_keys=1)
    feed.take(contents, {})
    contents.apply([RunStored(None, [A, B])])
    feed.add(events_of([RunStored(None, [A, B])]))
    frame = feed.take(contents, {})
    assert frame is not None and frame.snapshot and frame.sequence == 2
    assert feed.overflows == 1 and feed.idle


def test_a_reader_that_asks_again_is_told_everything() -> None:
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A])])
    feed.take(contents, {})
    feed.resend()
    assert feed.take(contents, {}) == BlockEvents(2, [BlocksStored(None, A[:8])], snapshot=True)


def test_what_tiers_reach_is_told_beside_it_each_in_its_own_order() -> None:
    contents, kept, feed = CacheContents(), {"host": CacheContents(), "disk": CacheContents()}, BlockFeed()
    contents.apply([RunStored(None, [A])])
    kept["disk"].apply([RunStored(None, [A, B])])
    stored = {"disk": [BlocksStored(None, A[:8] + B[:8])]}
    assert feed.take(contents, kept) == BlockEvents(1, [BlocksStored(None, A[:8])], snapshot=True, kept=stored)
    change = [RunStored(A, [C])]
    feed.add([], {"host": events_of(change)})
    assert not feed.idle
    feed.add(events_of(change), {"host": events_of(change)})
    event = BlocksStored(key(A), C[:8])
    assert feed.take(contents, kept) == BlockEvents(2, [event], kept={"host": [event, event]})
    assert feed.take(contents, kept) is None and feed.idle


def test_a_long_snapshot_of_tiers_comes_in_frames_and_what_waits_for_a_slow_reader_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_feed, "KEYS_PER_FRAME", 2)
    contents, kept, feed = CacheContents(), {"host": CacheContents()}, BlockFeed(max_waiting_keys=1)
    contents.apply([RunStored(None, [A])])
    kept["host"].apply([RunStored(None, [A, B, C])])
    frames = [feed.take(contents, kept) for _ in range(3)]
    assert [(len(f.events), {t: len(e) for t, e in f.kept.items()}, f.more) for f in frames if f is not None] == [
        (1, {}, True),
        (0, {"host": 1}, True),
        (0, {"host": 1}, False),
    ]
    feed.add([], {"host": events_of([RunStored(C, [D, E])])})
    assert feed.overflows == 1
    frame = feed.take(contents, kept)
    assert frame is not None and frame.snapshot


def test_a_node_without_tiers_says_what_it_always_said() -> None:
    """The bytes of a frame, for whoever reads the version before."""
    frame = BlockEvents(2, [BlocksRemoved(A[:8])])
    assert wire.encode(frame) == msgspec.msgpack.encode(
        {"type": "BlockEvents", "sequence": 2, "events": [{"type": "BlocksRemoved", "keys": A[:8]}]}
    )
    old = {"type": "BlockEvents", "sequence": 3, "events": [], "snapshot": False, "more": True}
    assert wire.decode(msgspec.msgpack.encode(old), NodeFrame) == BlockEvents(3, [], more=True)
