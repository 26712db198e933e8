import pytest

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import RunStored
from pipelines.node import block_feed
from pipelines.node.block_feed import BlockFeed, events_of
from pipelines.types.frames import BlockEvents, BlocksStored

A, B, C = (BlockHash(letter.encode() * 32) for letter in "ABC")


def key(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "little")


def test_a_session_begins_with_everything_that_is_cached_and_goes_on_with_each_change() -> None:
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A])])
    assert feed.take(contents) == BlockEvents(1, [BlocksStored(None, A[:8])], snapshot=True)
    assert feed.take(contents) is None and feed.idle
    feed.add(events_of([RunStored(A, [B])]))
    assert feed.take(contents) == BlockEvents(2, [BlocksStored(key(A), B[:8])])


def test_a_node_without_cached_blocks_says_so() -> None:
    assert BlockFeed().take(CacheContents()) == BlockEvents(1, [], snapshot=True)


def test_a_long_snapshot_comes_in_frames_and_changes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "KEYS_PER_FRAME", 1)
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A, B])])
    first = feed.take(contents)
    assert first is not None and (first.snapshot, first.more) == (True, True)
    contents.apply([RunStored(B, [C])])
    feed.add(events_of([RunStored(B, [C])]))
    second, third = feed.take(contents), feed.take(contents)
    assert second == BlockEvents(2, [BlocksStored(key(A), B[:8])])
    assert third == BlockEvents(3, [BlocksStored(key(B), C[:8])])


def test_a_reader_that_is_too_slow_gets_a_snapshot_in_place_of_what_it_missed() -> None:
    contents, feed = CacheContents(), BlockFeed(max_waiting_keys=1)
    feed.take(contents)
    contents.apply([RunStored(None, [A, B])])
    feed.add(events_of([RunStored(None, [A, B])]))
    frame = feed.take(contents)
    assert frame is not None and frame.snapshot and frame.sequence == 2
    assert feed.overflows == 1 and feed.idle


def test_a_reader_that_asks_again_is_told_everything() -> None:
    contents, feed = CacheContents(), BlockFeed()
    contents.apply([RunStored(None, [A])])
    feed.take(contents)
    feed.resend()
    assert feed.take(contents) == BlockEvents(2, [BlocksStored(None, A[:8])], snapshot=True)
