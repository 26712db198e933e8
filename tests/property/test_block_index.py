"""The block index beside the dumbest index there is: a set of prefixes for each holder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hashing import index_keys
from orchestrator.block_index import RUN_BLOCKS, BlockIndex
from pronghorn.ids import Incarnation

HOLDERS = [Incarnation(f"node-{i}") for i in range(4)]


def chain(path: tuple[int, ...], times: int = 1) -> list[int]:
    """The keys of the blocks along a path of branches, `times` a branch: equal where all before is equal."""
    keys = [0]
    for branch in path:
        for _ in range(times):
            keys.append(hash((keys[-1], branch)) & (2**64 - 1))
    return keys[1:]


def packed(keys: list[int]) -> bytes:
    return index_keys(key.to_bytes(8, "little") for key in keys)


class Plain:
    """Prefixes by holder, each a path; closed towards the root."""

    def __init__(self) -> None:
        self.held: dict[Incarnation, set[tuple[int, ...]]] = {holder: set() for holder in HOLDERS}

    def stored(self, holder: Incarnation, path: tuple[int, ...]) -> None:
        self.held[holder] |= {path[: i + 1] for i in range(len(path))}

    def removed(self, holder: Incarnation, path: tuple[int, ...]) -> None:
        self.held[holder] = {p for p in self.held[holder] if p[: len(path)] != path}

    def find(self, path: tuple[int, ...]) -> dict[Incarnation, int]:
        found = {h: sum(path[: i + 1] in held for i in range(len(path))) for h, held in self.held.items()}
        return {holder: depth for holder, depth in found.items() if depth}


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(HOLDERS), paths),
    st.tuples(st.just("remove"), st.sampled_from(HOLDERS), paths),
    st.tuples(st.just("evict"), st.sampled_from(HOLDERS), paths),
    st.tuples(st.just("drop"), st.sampled_from(HOLDERS), paths),
    st.tuples(st.just("sweep"), st.sampled_from(HOLDERS), paths),
)


@settings(max_examples=200, deadline=None)
@given(history=st.lists(steps, max_size=30), times=st.sampled_from([1, 3, RUN_BLOCKS // 4 + 1]))
def test_after_any_history_it_finds_what_plain_sets_of_prefixes_find(
    history: list[tuple[str, Incarnation, tuple[int, ...]]], times: int
) -> None:
    index, plain = BlockIndex(), Plain()

    def truth(path: tuple[int, ...]) -> dict[Incarnation, int]:
        return {holder: times * depth for holder, depth in plain.find(path).items()}

    for what, holder, path in history:
        keys = chain(path, times)
        match what:
            case "store":
                known = truth(path).get(holder, 0)
                if known in (0, len(keys)):
                    index.stored(holder, None, packed(keys))
                else:
                    index.stored(holder, keys[known - 1], packed(keys[known:]))
                plain.stored(holder, path)
            case "remove":
                index.removed(holder, packed(keys[-times:]))
                plain.removed(holder, path)
            case "evict":  # from the end, as a pool does
                index.removed(holder, packed(keys[: times - 1 : -1]))
                if len(path) > 1:
                    plain.removed(holder, path[:2])
            case "drop":
                index.dropped(holder)
                plain.held[holder] = set()
            case "sweep":
                index.sweep(2)
        index.check()
        assert index.find(packed(keys)) == truth(path)
    for path in [(0,) * 6, (1, 0, 2, 1), (2,), (0, 1, 2)]:
        for count in (1, 2, 4):
            best = index.find_best(packed(chain(path, times)), count)
            assert sorted(best.values(), reverse=True) == sorted(truth(path).values(), reverse=True)[:count]
            assert best.items() <= truth(path).items()
        few = HOLDERS[:2]
        found = index.depths(packed(chain(path, times)), few)
        assert found == {holder: depth for holder, depth in truth(path).items() if holder in few}
    index.sweep(1 << 30)
    index.check()
    assert index.size().blocks == times * len(set().union(*plain.held.values()))
    assert {h: len(keys) for h, keys in index.dump().items()} == {h: times * len(p) for h, p in plain.held.items() if p}


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "drop"]),
            st.sampled_from(HOLDERS),
            st.none() | st.integers(0, 6),
            st.lists(st.integers(0, 6), max_size=5),
        ),
        max_size=40,
    )
)
def test_garbage_breaks_nothing(events: list[tuple[str, Incarnation, int | None, list[int]]]) -> None:
    """Keys at two places, twice in one event, their own parents."""
    index = BlockIndex()
    for what, holder, parent, keys in events:
        if what == "store":
            index.stored(holder, parent, packed(keys))
        elif what == "remove":
            index.removed(holder, packed(keys))
        else:
            index.dropped(holder)
        index.check()
        index.find(packed(keys))


@pytest.mark.field("dynamo#4429")
@settings(max_examples=50, deadline=None)
@given(stored=st.lists(st.tuples(st.sampled_from(HOLDERS), paths), max_size=25))
def test_above_its_cap_it_gives_up_leaves_and_never_claims_more_than_is_held(
    stored: list[tuple[Incarnation, tuple[int, ...]]],
) -> None:
    cap = 400_000
    index, plain = BlockIndex(cap), Plain()
    for holder, path in stored:
        keys = packed(chain(path, 300))
        index.stored(holder, None, keys)
        plain.stored(holder, path)
        index.check()
        assert index.size().bytes <= 1.2 * (cap + 120 * len(keys) // 8)
        truth = plain.find(path)
        assert all(depth <= 300 * truth.get(other, 0) for other, depth in index.find(keys).items())


@pytest.mark.field("dynamo#4429")
def test_when_it_is_first_full_it_gives_up_what_nobody_asked_for() -> None:
    index = BlockIndex(400_000)
    asked_for = packed(chain((0, 0, 0), 100))
    index.stored(HOLDERS[0], None, asked_for)
    for number in range(1, 200):
        index.stored(HOLDERS[1], None, packed(chain((number,), 100)))
        assert index.find(asked_for) == {HOLDERS[0]: 300}
    assert index.tally().forgotten > 0
