from random import Random

from kvcache.registry import NodeRecord
from orchestrator.nodes import Nodes, NodeView
from orchestrator.routing.reservation import Reservations
from pronghorn.ids import Incarnation
from tests.fakes.memory_node import MODEL, record, report

FIRST = record("decode-1", incarnation="life-1")
SECOND = record("decode-1", incarnation="life-2", registered_at_unix_s=2.0)


def nodes_with_session(now_s: float = 0.0) -> Nodes:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    nodes.listed([FIRST])
    nodes.opened(FIRST.incarnation)
    nodes.heartbeat(FIRST.incarnation, report(FIRST), now_s)
    return nodes


def only(nodes: Nodes, now_s: float = 0.0) -> NodeView:
    (view,) = nodes.views(now_s)
    return view


def test_a_listed_node_is_to_be_connected_to_and_not_usable_yet() -> None:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    assert nodes.listed([FIRST]).joined == [FIRST]
    assert nodes.listed([FIRST]).joined == []
    assert only(nodes).unusable == "not connected yet"
    (said,) = nodes.reports(0.0)
    assert (said.name, said.healthy) == ("decode-1", False)


def test_a_node_of_another_model_is_none_of_ours() -> None:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    assert nodes.listed([record("decode-9", model="other")]).joined == []
    assert nodes.views(0.0) == []


def test_usable_needs_a_session_and_a_fresh_heartbeat() -> None:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    nodes.listed([FIRST])
    nodes.opened(FIRST.incarnation)
    assert only(nodes).unusable == "no heartbeat yet"
    nodes.heartbeat(FIRST.incarnation, report(FIRST), 10.0)
    assert only(nodes, 12.0).unusable is None
    assert only(nodes, 12.5).unusable == "silent for 2.5 s"
    assert nodes.reports(12.0)[0].healthy and not nodes.reports(12.5)[0].healthy


def test_silence_of_a_session_is_named_once_it_is_longer_than_the_bound() -> None:
    nodes = nodes_with_session()
    assert nodes.silent(1.0, 1.0) == []
    assert nodes.silent(1.0, 1.1) == [FIRST.incarnation]
    nodes.heard(FIRST.incarnation, 1.1)
    assert nodes.silent(1.0, 2.0) == []
    nodes.closed(FIRST.incarnation, "it ended")
    assert nodes.silent(1.0, 9.0) == []


def test_time_in_which_nothing_could_be_heard_is_no_silence() -> None:
    nodes = nodes_with_session()
    for now_s in (0.0, 0.2, 0.4):
        nodes.tick(now_s)
    assert only(nodes, 60.0).unusable is None, "the next tick has not come: nobody listened"
    nodes.tick(60.0)
    assert only(nodes, 60.0).unusable is None
    assert nodes.silent(1.0, 60.0) == []
    for tick in range(1, 12):
        nodes.tick(60.0 + 0.2 * tick)
    assert only(nodes, 62.2).unusable == "silent for 3.1 s"


def test_an_unhealthy_or_draining_node_gets_no_work() -> None:
    nodes = nodes_with_session()
    nodes.heartbeat(FIRST.incarnation, report(FIRST, healthy=False), 0.0)
    assert only(nodes).unusable == "unhealthy"
    nodes.heartbeat(FIRST.incarnation, report(FIRST, draining=True), 0.0)
    assert only(nodes).unusable == "draining"


def test_a_closed_session_says_why_and_a_new_one_waits_for_its_own_heartbeat() -> None:
    nodes = nodes_with_session()
    nodes.closed(FIRST.incarnation, "ping timeout")
    assert only(nodes).unusable == "ping timeout"
    nodes.opened(FIRST.incarnation)
    assert only(nodes).unusable == "no heartbeat yet"


def test_a_node_is_coming_back_until_its_new_session_has_had_its_first_heartbeat() -> None:
    nodes = nodes_with_session()
    assert not nodes.reconnecting(5.0, 1.0)
    nodes.lost(FIRST.incarnation, 1.0)
    nodes.closed(FIRST.incarnation, "connection reset")
    assert nodes.reconnecting(5.0, 1.0)
    nodes.opened(FIRST.incarnation)
    assert nodes.reconnecting(5.0, 1.0)
    nodes.heartbeat(FIRST.incarnation, report(FIRST), 1.0)
    assert not nodes.reconnecting(5.0, 1.0)


def test_a_new_incarnation_replaces_the_old_under_its_name() -> None:
    nodes = nodes_with_session()
    change = nodes.listed([SECOND])
    assert change.joined == [SECOND]
    assert change.replaced == [FIRST.incarnation]
    assert only(nodes).incarnation == SECOND.incarnation
    nodes.heartbeat(FIRST.incarnation, report(FIRST), 0.0)
    nodes.closed(FIRST.incarnation, "late")
    assert only(nodes).unusable == "not connected yet"


def test_a_node_that_falls_out_of_the_registry_stays_while_its_session_lives() -> None:
    nodes = nodes_with_session()
    change = nodes.listed([])
    assert (change.joined, change.replaced) == ([], [])
    assert only(nodes).unusable is None
    assert not nodes.registered(FIRST.incarnation)
    nodes.closed(FIRST.incarnation, "it left")
    assert nodes.views(0.0) == []


def test_a_node_that_comes_back_to_the_registry_is_not_connected_to_twice() -> None:
    nodes = nodes_with_session()
    nodes.listed([])
    assert nodes.listed([FIRST]).joined == []
    assert nodes.registered(FIRST.incarnation)


def test_load_counts_what_was_sent_since_the_last_report() -> None:
    nodes = nodes_with_session()
    nodes.heartbeat(FIRST.incarnation, report(FIRST, in_flight=4), 0.0)
    nodes.dispatched(FIRST.incarnation)
    nodes.dispatched(FIRST.incarnation)
    assert only(nodes).in_flight == 6
    nodes.heartbeat(FIRST.incarnation, report(FIRST, in_flight=1), 0.0)
    assert only(nodes).in_flight == 2, "two of ours run, whatever the report has seen of them"
    nodes.ended(FIRST.incarnation)
    nodes.ended(FIRST.incarnation)
    assert only(nodes).in_flight == 1


def test_what_is_said_of_unknown_lives_is_ignored() -> None:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    ghost = Incarnation("ghost")
    nodes.opened(ghost)
    nodes.heartbeat(ghost, report(FIRST), 0.0)
    nodes.dispatched(ghost)
    nodes.ended(ghost)
    nodes.closed(ghost, "gone")
    assert nodes.views(0.0) == []


def happen(random: Random, nodes: Nodes, reservations: Reservations, of: NodeRecord, now_s: float) -> None:
    """One thing that can happen to a node."""
    life = of.incarnation
    random.choice(
        (
            lambda: nodes.tick(now_s),
            lambda: nodes.opened(life),
            lambda: nodes.heartbeat(life, report(of, healthy=random.random() < 0.9), now_s),
            lambda: nodes.heartbeat(life, report(of, in_flight=random.randrange(5)), now_s),
            lambda: nodes.heard(life, now_s),
            lambda: nodes.dispatched(life, random.randrange(9)),
            lambda: nodes.ended(life),
            lambda: nodes.computed(life),
            lambda: nodes.asked([life], now_s),
            lambda: nodes.let_go([life]),
            lambda: nodes.failed(life, now_s),
            lambda: nodes.succeeded(life, now_s),
            lambda: reservations.reserve(life, 7, now_s),
        )
    )()


def test_a_view_is_kept_only_as_long_as_nothing_has_changed() -> None:
    """Whatever happens, in whatever order: what is shown is what would be made anew."""
    random, reservations = Random(1), Reservations()
    nodes = Nodes(MODEL, 1.0, reservations=reservations)
    records = [record(f"{role}-{i}", role) for i in range(3) for role in ("decode", "prefill")]  # type: ignore[arg-type]  # a role
    nodes.listed(records)
    now_s, kept = 0.0, 0
    for _ in range(2000):
        now_s += random.choice((0.0, 0.01, 0.3))
        happen(random, nodes, reservations, random.choice(records), now_s)
        shown = nodes.views(now_s)
        kept += sum(one is other for one, other in zip(shown, nodes.views(now_s), strict=True))
        for each in records:
            nodes._changed(each.incarnation)
        assert shown == nodes.views(now_s)
    assert kept


def test_a_machine_is_gone_with_the_last_of_its_sessions() -> None:
    nodes = Nodes(MODEL, heartbeat_timeout_s=2.0)
    here = [record(f"{role}-1", role, address=f"127.0.0.3:{port}") for role, port in (("prefill", 1), ("decode", 2))]
    elsewhere = record("decode-2", address="127.0.0.4:2")
    nodes.listed([*here, elsewhere])
    for each in (*here, elsewhere):
        nodes.opened(each.incarnation)
    prefill, decode = (each.incarnation for each in here)
    nodes.closed(decode, "connection reset")
    assert nodes.machine_gone(decode) == frozenset(), "a prefill node is still there"
    nodes.closed(prefill, "connection reset")
    assert nodes.machine_gone(prefill) == {prefill, decode}
    nodes.closed(elsewhere.incarnation, "connection reset")
    assert nodes.machine_gone(elsewhere.incarnation) == frozenset(), "a node alone is no more than itself"
    assert nodes.machine_gone(Incarnation("nobody")) == frozenset()
