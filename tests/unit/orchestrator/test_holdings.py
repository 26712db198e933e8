import msgspec
import pytest

from kvcache.hashing import index_keys
from orchestrator.holdings import ASKS_AGAIN_S, DRIFT_LASTS_S, EXPECTS_S, Holdings
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored, NodeReport, TierReport
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation
from tests.fakes.memory_node import record, report

NODE = Incarnation("node.life")
OTHER = Incarnation("node.next-life")
PROMPT = index_keys((i + 1).to_bytes(8, "little") for i in range(8))


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def holdings(counters: Counters) -> Holdings:
    return Holdings(1 << 24, counters)


def stored(first: int, last: int) -> BlocksStored:
    return BlocksStored(first or None, PROMPT[8 * first : 8 * last])


def snapshot(sequence: int, *events: BlocksStored, more: bool = False) -> BlockEvents:
    return BlockEvents(sequence, list(events), snapshot=True, more=more)


def said(found: int | None) -> NodeReport:
    life = record("node", incarnation=NODE)
    return NodeReport(
        **{f: getattr(report(life), f) for f in NodeReport.__struct_fields__} | {"findable_blocks": found}
    )


def test_a_snapshot_then_events_in_order_are_what_the_node_holds(holdings: Holdings) -> None:
    assert not holdings.events(NODE, snapshot(1, stored(0, 2), more=True), 0.0)
    assert not holdings.synced(NODE)
    assert not holdings.events(NODE, BlockEvents(2, [stored(2, 4)]), 0.0)
    assert holdings.synced(NODE)
    assert not holdings.events(NODE, BlockEvents(3, [stored(4, 6), BlocksRemoved(PROMPT[40:48])]), 0.0)
    assert holdings.find(PROMPT) == {NODE: 5}
    holdings.events(NODE, BlockEvents(4, [BlocksCleared()]), 0.0)
    assert holdings.find(PROMPT) == {}


def test_who_says_that_it_has_blocks_and_has_not_told_which_is_behind(holdings: Holdings) -> None:
    assert holdings.behind([said(0), said(None)]) == []
    assert holdings.behind([said(2)]) == ["node"]
    holdings.events(NODE, snapshot(1, stored(0, 2)), 0.0)
    assert holdings.behind([said(2)]) == []


@pytest.mark.field("llm-d-router#1737", "llm-d-router#1887")
def test_a_missing_frame_is_noticed_and_a_snapshot_is_asked_for_until_it_comes(
    holdings: Holdings, counters: Counters
) -> None:
    holdings.events(NODE, snapshot(1, stored(0, 2)), 0.0)
    assert holdings.events(NODE, BlockEvents(3, [stored(2, 4)]), 0.0)
    assert not holdings.events(NODE, BlockEvents(4, [stored(4, 6)]), ASKS_AGAIN_S / 2)
    assert holdings.events(NODE, BlockEvents(5, [stored(6, 7)]), ASKS_AGAIN_S)
    assert holdings.find(PROMPT) == {NODE: 2}
    assert not holdings.events(NODE, snapshot(6, stored(0, 7)), ASKS_AGAIN_S)
    assert holdings.find(PROMPT) == {NODE: 7}
    assert counters.snapshot()["block_events_lost"] == 1


@pytest.mark.field("llm-d-router#2853")
def test_a_sequence_that_goes_backwards_empties_what_was_known(holdings: Holdings) -> None:
    holdings.events(NODE, snapshot(7, stored(0, 4)), 0.0)
    assert holdings.events(NODE, BlockEvents(1, [stored(0, 1)]), 0.0)
    assert holdings.find(PROMPT) == {}


@pytest.mark.field("kthena#1223", "kthena#1428", "kthena#1463")
def test_a_snapshot_replaces_and_another_life_inherits_nothing(holdings: Holdings) -> None:
    """The same name, restarted, is credited with nothing."""
    holdings.events(NODE, snapshot(1, stored(0, 6)), 0.0)
    holdings.events(NODE, snapshot(2, stored(0, 1)), 0.0)
    assert holdings.find(PROMPT) == {NODE: 1}
    holdings.lost(NODE)
    holdings.events(OTHER, snapshot(1), 0.0)
    assert holdings.find(PROMPT) == {}


def test_events_before_any_snapshot_are_not_built_on(holdings: Holdings) -> None:
    assert holdings.events(NODE, BlockEvents(4, [stored(0, 2)]), 0.0)
    assert holdings.find(PROMPT) == {}


@pytest.mark.field("llm-d-kv-cache#544")
def test_what_was_given_out_counts_as_held_for_a_while(holdings: Holdings, counters: Counters) -> None:
    """What was expected and never came is counted."""
    holdings.tick(0.0)
    holdings.events(NODE, snapshot(1), 0.0)
    holdings.expect(NODE, PROMPT)
    assert holdings.find(PROMPT) == holdings.find(PROMPT, [NODE]) == {NODE: 8}
    assert holdings.find_best(PROMPT, 1) == [NODE]
    holdings.tick(EXPECTS_S)
    assert holdings.find(PROMPT) == {NODE: 8}
    holdings.tick(2 * EXPECTS_S)
    assert holdings.find(PROMPT) == {}
    assert counters.snapshot()["block_expected_in_vain"] == 1


def test_what_was_expected_and_came_is_simply_held(holdings: Holdings, counters: Counters) -> None:
    holdings.tick(0.0)
    holdings.events(NODE, snapshot(1), 0.0)
    holdings.expect(NODE, PROMPT)
    holdings.events(NODE, BlockEvents(2, [stored(0, 8)]), 0.0)
    holdings.tick(EXPECTS_S)
    holdings.tick(2 * EXPECTS_S)
    assert holdings.find(PROMPT) == {NODE: 8}
    assert "block_expected_in_vain" not in counters.snapshot()


def test_a_lost_node_is_expected_to_hold_nothing(holdings: Holdings) -> None:
    holdings.expect(NODE, PROMPT)
    holdings.lost(NODE)
    assert holdings.find(PROMPT) == {}
    holdings.check()


@pytest.mark.field("aibrix#2287", "llm-d-kv-cache#593")
def test_an_index_that_stays_far_from_what_the_node_says_is_made_anew(holdings: Holdings) -> None:
    """An event that was lost without a gap is made up for within seconds."""
    holdings.events(NODE, snapshot(1, stored(0, 8)), 0.0)
    assert not holdings.heartbeat(said(8), 0.0)
    assert not holdings.heartbeat(said(200), 1.0)
    assert not holdings.heartbeat(said(8), 2.0)
    assert not holdings.heartbeat(said(200), 3.0)
    assert holdings.heartbeat(said(200), 3.0 + DRIFT_LASTS_S)
    assert not holdings.heartbeat(said(None), 9.0)


def test_nothing_is_said_of_a_prompt_without_blocks(holdings: Holdings) -> None:
    holdings.events(NODE, snapshot(1, stored(0, 8)), 0.0)
    assert holdings.find(b"") == holdings.find(b"", [NODE]) == {}


def test_gauges_tell_entries_who_is_followed_and_how_far_the_index_is_off(holdings: Holdings) -> None:
    holdings.events(NODE, snapshot(1, stored(0, 2)), 0.0)
    holdings.events(OTHER, snapshot(1, stored(0, 3), more=True), 0.0)
    holdings.expect(NODE, PROMPT)
    holdings.heartbeat(said(7), 0.0)
    told = holdings.gauges()
    assert told["block_index_entries"] == 5 and told["block_index_nodes_synced"] == 1
    assert told["block_index_drift_blocks"] == 5
    holdings.heartbeat(said(2), 0.1)
    assert holdings.gauges()["block_index_drift_blocks"] == 0
    holdings.lost(OTHER)
    holdings.lost(NODE)
    told = holdings.gauges()
    assert told["block_index_entries"] == told["block_index_nodes_synced"] == told["block_index_drift_blocks"] == 0


# --- tiers ------------------------------------------------------------------------------------------------------------


def tiered(sequence: int, pool: int, host: int, disk: int, snapshot: bool = True) -> BlockEvents:
    """So many leading blocks of the prompt can be had from the pool, from host memory as well, from disk as well."""
    found = {"host": host, "disk": disk}
    kept = {tier: [stored(0, blocks)] for tier, blocks in found.items() if blocks}
    return BlockEvents(sequence, [stored(0, pool)] if pool else [], snapshot=snapshot, kept=kept)


def test_what_a_life_could_bring_back_is_found_beside_what_it_holds(holdings: Holdings) -> None:
    holdings.events(NODE, tiered(1, pool=2, host=5, disk=8), 0.0)
    holdings.events(OTHER, snapshot(1, stored(0, 3)), 0.0)
    assert holdings.find(PROMPT) == holdings.find(PROMPT, [NODE, OTHER]) == {NODE: 2, OTHER: 3}
    assert holdings.find_kept(PROMPT, [NODE, OTHER]) == {NODE: {"host": 5, "disk": 8}}
    assert holdings.find_kept(PROMPT, [OTHER]) == {}
    assert NODE in holdings.find_best(PROMPT, 1)
    holdings.events(NODE, BlockEvents(2, [BlocksCleared()], kept={"host": [BlocksRemoved(PROMPT[8:16])]}), 0.0)
    assert holdings.find(PROMPT) == {OTHER: 3}
    assert holdings.find_kept(PROMPT, [NODE]) == {NODE: {"host": 1, "disk": 8}}
    holdings.check()


def test_tiers_go_with_their_life_and_begin_anew_with_a_snapshot(holdings: Holdings) -> None:
    holdings.events(NODE, tiered(1, pool=2, host=5, disk=8), 0.0)
    assert holdings.events(NODE, tiered(3, pool=1, host=8, disk=8, snapshot=False), 0.0)
    assert holdings.find_kept(PROMPT, [NODE]) == {NODE: {"host": 5, "disk": 8}}  # behind a gap nothing is taken
    holdings.events(NODE, tiered(4, pool=1, host=1, disk=2), 0.0)
    assert holdings.find_kept(PROMPT, [NODE]) == {NODE: {"host": 1, "disk": 2}}
    assert holdings.events(NODE, tiered(2, pool=1, host=4, disk=4, snapshot=False), 3.0)  # from before
    assert holdings.find_kept(PROMPT, [NODE]) == {NODE: {"host": 0, "disk": 0}}
    holdings.events(NODE, tiered(5, pool=1, host=1, disk=2), 3.0)
    holdings.lost(NODE)
    assert holdings.find_kept(PROMPT, [NODE]) == {} and holdings.find_best(PROMPT, 4) == []
    holdings.check()
    assert holdings.gauges()["block_index_entries"] == 0


def test_a_tier_that_nobody_here_knows_is_passed_over(holdings: Holdings) -> None:
    frame = BlockEvents(1, [stored(0, 2)], snapshot=True, kept={"tape": [stored(0, 8)], "host": [stored(0, 3)]})
    holdings.events(NODE, frame, 0.0)
    assert holdings.find_kept(PROMPT, [NODE]) == {NODE: {"host": 3}}
    assert holdings.find(PROMPT) == {NODE: 2}


def test_a_tier_that_drifts_from_what_the_node_says_is_asked_for(holdings: Holdings) -> None:
    holdings.events(NODE, tiered(1, pool=2, host=5, disk=0), 0.0)
    report = msgspec.structs.replace(said(2), tiers={"host": TierReport(500)})
    assert not holdings.heartbeat(report, 0.0)
    assert holdings.gauges()["block_index_drift_blocks"] == 495
    assert holdings.heartbeat(report, DRIFT_LASTS_S)
    holdings.events(NODE, tiered(2, pool=2, host=5, disk=0), DRIFT_LASTS_S)
    right = msgspec.structs.replace(said(2), tiers={"host": TierReport(5)})
    assert not holdings.heartbeat(right, 10.0) and not holdings.heartbeat(right, 20.0)


def test_what_tiers_hold_counts_to_the_cap(counters: Counters) -> None:
    holdings = Holdings(1 << 20, counters)
    for chain in range(64):
        keys = index_keys((1 + 1000 * chain + i).to_bytes(8, "little") for i in range(900))
        event = BlocksStored(None, keys)
        frame = BlockEvents(chain + 1, [], snapshot=not chain, kept={"host": [event], "disk": [event]})
        holdings.events(NODE, frame, 0.0)
    assert holdings.gauges()["block_index_bytes"] <= 1.1 * (1 << 20)
    assert holdings.gauges()["block_index_forgotten"] > 0
    holdings.check()
