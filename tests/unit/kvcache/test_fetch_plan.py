import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.fetch_plan import (
    COMPUTE,
    FADES_S,
    MIN_SEGMENT_BLOCKS,
    BlockPrices,
    Rates,
    Segment,
    patience_s,
    segments,
    wait_s,
)


def test_a_rate_is_of_the_latest_measurements_by_weight() -> None:
    rates = Rates()
    assert rates.rate("a", 0.0) is None
    rates.note("a", 100.0, 1.0, 0.0)
    rates.note("a", 1000.0, 1.0, 1.0)
    rate = rates.rate("a", 1.0)
    assert rate is not None and 550.0 < rate < 1000.0
    rates.note("a", 1.0, 0.0, 2.0)  # took no time: says nothing
    assert rates.rate("a", 2.0) == rate


def test_an_old_measurement_says_nothing_any_more() -> None:
    rates = Rates()
    rates.note("a", 1.0, 10.0, 0.0)
    assert rates.rate("a", FADES_S) is not None and rates.rate("a", FADES_S + 0.1) is None


def test_what_was_measured_of_those_that_have_gone_is_not_kept() -> None:
    """A peer that restarts is another name each time."""
    rates = Rates()
    for life in range(1000):
        rates.note(f"life-{life}", 1.0, 1.0, life * FADES_S / 2)
    assert len(rates._measured) <= 4


@pytest.mark.field("LMCache#1640")
def test_blocks_are_brought_where_the_link_beats_the_engine_or_nothing_is_known() -> None:
    rates = Rates()
    prices = BlockPrices(rates, block_bytes=1000, block_tokens=16)
    assert prices.cheaper_to_bring({"peer": 1}, 5.0, 0.0)
    rates.note(COMPUTE, 10.0, 1.0, 0.0)  # 1.6 s a block
    assert prices.cheaper_to_bring({"peer": 1}, 5.0, 0.0)
    rates.note("peer", 1000.0, 1.0, 0.0)
    assert prices.cheaper_to_bring({"peer": 1}, 0.5, 0.0)
    assert not prices.cheaper_to_bring({"peer": 1}, 0.7, 0.0)


def test_what_comes_from_several_sources_takes_as_long_as_all_of_them_together() -> None:
    rates = Rates()
    prices = BlockPrices(rates, block_bytes=1000, block_tokens=16)
    rates.note(COMPUTE, 10.0, 1.0, 0.0)
    rates.note("host", 1e6, 1.0, 0.0)
    rates.note("disk", 500.0, 1.0, 0.0)  # 2 s a block
    assert prices.cheaper_to_bring({"host": 2, "disk": 1}, 0.0, 0.0)
    assert not prices.cheaper_to_bring({"disk": 1}, 0.0, 0.0)


def test_waiting_is_bounded_by_what_computing_would_take() -> None:
    assert wait_s(1000, 100.0) == 20.0 and wait_s(1, 100.0) == 0.5
    assert patience_s(1000, 100.0) == 0.5 and patience_s(40, 100.0) == 0.1


def test_what_two_have_is_shared_out_by_speed_and_the_deeper_one_gives_the_rest() -> None:
    assert segments(0, [("a", 40, 1.0), ("b", 40, 3.0)]) == [Segment("a", 0, 10), Segment("b", 10, 40)]
    assert segments(0, [("deep", 100, 1.0), ("shallow", 20, 9.0)]) == [
        Segment("shallow", 0, 20),
        Segment("deep", 20, 100),
    ]
    assert segments(5, [("a", 5, 1.0)]) == []


def test_few_blocks_come_from_one_node() -> None:
    assert segments(0, [("a", 9, None), ("b", 9, None)]) == [Segment("b", 0, 9)]


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 200), st.none() | st.floats(0.1, 1e9)), max_size=6),
)
def test_segments_cover_what_the_deepest_has_once_and_ask_nobody_for_more_than_it_has(start, drawn):
    holders = [(f"n{i}", depth, speed) for i, (depth, speed) in enumerate(drawn)]
    depth_of = {name: depth for name, depth, _ in holders}
    found = segments(start, holders)
    position = start
    for segment in found:
        assert segment.start == position < segment.stop <= depth_of[segment.name]
        position = segment.stop
    deepest = max(depth_of.values(), default=0)
    assert position == max(start, deepest)
    assert len(found) <= max(1, (deepest - start) // MIN_SEGMENT_BLOCKS)
