"""Whatever order the pool's and the tiers' changes come in: what is told is what can be found without a gap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash
from kvcache.journal import AllRemoved, CacheChange, Removed, RunStored
from kvcache.tier_reach import TierReach

paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
places = st.sampled_from(["pool", "host", "disk"])
moves = st.tuples(st.sampled_from(["add", "add", "add", "remove", "clear", "take"]), places, paths)


def name(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes([*path, *([9] * (32 - len(path)))]))


def found(paths: set[tuple[int, ...]]) -> set[BlockHash]:
    return {name(path) for path in paths if all(path[:depth] in paths for depth in range(1, len(path)))}


@settings(max_examples=300, deadline=None)
@given(moves=st.lists(moves, max_size=60))
def test_each_tier_reaches_what_has_no_gap_in_the_pool_and_what_is_brought_back_no_later(
    moves: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    reach = TierReach(["disk", "host"])
    model: dict[str, set[tuple[int, ...]]] = {"pool": set(), "host": set(), "disk": set()}
    told = {"host": CacheContents(), "disk": CacheContents()}
    calls = 0

    def changed() -> None:
        nonlocal calls
        calls += 1

    reach.on_change = changed
    for what, place, path in moves:
        before = name(path[:-1]) if len(path) > 1 else None
        if what == "add":
            model[place].add(path)
            if place == "pool":
                reach.pool_changed([RunStored(before, [name(path)])])
            else:
                reach.kept(place, name(path), before)
        elif what == "remove":
            model[place].discard(path)
            if place == "pool":
                reach.pool_changed([Removed([name(path)])])
            else:
                reach.lost(place, name(path))
        elif what == "clear" and place == "pool":
            model["pool"].clear()
            reach.pool_changed([AllRemoved()])
        elif what == "clear":
            model["host"].clear()
            model["disk"].clear()
            reach.cleared()
        if what == "take":
            calls = 0
            taken: dict[str, list[CacheChange]] = reach.take()
            for tier, changes in taken.items():
                for change in changes:
                    if isinstance(change, RunStored) and change.parent is not None:
                        assert BlockHash(change.parent) in told[tier]
                    told[tier].apply([change])
            held = {tier: {h for run in c.runs(99) for h in run.hashes} for tier, c in told.items()}
            assert held["host"] == found(model["pool"] | model["host"])
            assert held["disk"] == found(model["pool"] | model["host"] | model["disk"])
            for tier in ("host", "disk"):
                assert {h for run in reach.contents[tier].runs(99) for h in run.hashes} == held[tier]
        assert calls <= 1


def test_a_run_is_told_as_one_and_the_loss_of_all_in_a_word() -> None:
    reach = TierReach(["host"])
    chain = [name((0,) * depth) for depth in range(1, 5)]
    reach.pool_changed([RunStored(None, list(chain))])
    assert reach.take() == {"host": [RunStored(None, list(chain))]}
    for before, each in zip([None, *chain], chain, strict=False):
        reach.kept("host", each, before)
    assert reach.take() == {}
    reach.pool_changed([AllRemoved()])
    assert reach.take() == {}
    reach.lost("host", chain[0])
    assert reach.take() == {"host": [AllRemoved()]}
