"""Whatever is added, used and given up: what is kept can be found from its chain's start, in memory alone as well."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hashing import BlockHash
from kvcache.tier_order import TIERS, TierOrder

paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
moves = st.tuples(st.sampled_from(["add", "add", "add", "touch", "demote", "leave", "drop", "clear"]), paths)


def name(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(path) + bytes(32 - len(path)) + bytes([len(path)]))


class Model:
    """The same, found by walking over everything."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, ...], str] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.now = 0

    def follow(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [other for other in self.tiers if len(other) > len(path) and other[: len(path)] == path]

    def ends(self, tier: str) -> list[tuple[int, ...]]:
        inner = {path[:-1] for path, where in self.tiers.items() if tier == "disk" or where == "host"}
        return [path for path, where in self.tiers.items() if where == tier and path not in inner]

    def oldest(self, tier: str) -> tuple[int, ...] | None:
        return min(self.ends(tier), key=lambda path: self.used[path], default=None)

    def left(self, path: tuple[int, ...]) -> None:
        """Its time goes to what it followed."""
        if (before := path[:-1]) in self.used:
            self.used[before] = max(self.used[before], self.used[path])


@settings(max_examples=300, deadline=None)
@given(moves=st.lists(moves, max_size=60))
def test_the_end_of_the_least_recently_used_chain_leaves_first(moves: list[tuple[str, tuple[int, ...]]]) -> None:
    order, model = TierOrder(), Model()
    for what, path in moves:
        before = path[:-1]
        if what == "add" and path not in model.tiers and (not before or before in model.tiers):
            tier = "disk" if before and model.tiers[before] == "disk" else "host"
            model.now += 1
            model.tiers[path], model.used[path] = tier, model.now
            order.add(name(path), name(before) if before else None, tier)
        elif what == "touch" and path in model.tiers:
            model.now += 1
            model.used[path] = model.now
            order.touch(name(path))
        elif what == "demote" and (end := model.oldest("host")) is not None:
            assert order.oldest("host") == name(end)
            model.tiers[end] = "disk"
            model.left(end)
            order.demote(name(end))
        elif what == "leave" and (end := model.oldest("disk")) is not None:
            assert order.oldest("disk") == name(end)
            model.left(end)
            del model.tiers[end], model.used[end]
            assert order.drop(name(end)) == [name(end)]
        elif what == "drop" and path in model.tiers:
            gone = [path, *model.follow(path)]
            model.left(path)
            dropped = order.drop(name(path))
            assert sorted(dropped) == sorted(map(name, gone))
            for other in gone:
                del model.tiers[other], model.used[other]
        elif what == "clear":
            order.clear()
            model.tiers.clear()
            model.used.clear()
        for tier in TIERS:
            end = model.oldest(tier)
            assert order.oldest(tier) == (None if end is None else name(end))
            assert order.count(tier) == sum(where == tier for where in model.tiers.values())
        for path_, where in model.tiers.items():
            assert order.tier(name(path_)) == where
            assert len(path_) == 1 or path_[:-1] in model.tiers
            assert where == "disk" or len(path_) == 1 or model.tiers[path_[:-1]] == "host"
