"""A cluster of one orchestrator, one decode and one prefill node, and everything that may not add up in it."""

from collections.abc import Sequence

import msgspec
import pytest

from cluster.ledger_audit import COUNTERPARTS, OWNERS, Leftover, Look, Registered, lasting, leftovers
from pronghorn.ids import Incarnation
from pronghorn.ledger import STANDING, Held, Kind, Ledger

R, D, P, GONE = (Incarnation(letter * 32) for letter in "odpx")
NAMES = {R: "orchestrator-1", D: "decode-1", P: "prefill-1"}
FENCE = "r#1@dddddddd"

SESSIONS = {
    R: [Held(Kind.SESSION, "decode-1", peer=D), Held(Kind.SESSION, "prefill-1", peer=P)],
    D: [Held(Kind.SESSION, "orchestrator-1", peer=R), Held(Kind.TASK, "sweep")],
    P: [Held(Kind.SESSION, "orchestrator-1", peer=R)],
}
FLYING = {
    R: [
        Held(Kind.FLIGHT, "r"),
        Held(Kind.SLOT, "r"),
        Held(Kind.TIMER, "r"),
        Held(Kind.UNREAD, "r", 3),
        Held(Kind.DISPATCHED, FENCE, peer=D),
    ],
    D: [
        Held(Kind.ATTEMPT, FENCE, peer=R),
        Held(Kind.PULL, FENCE, peer=P),
        Held(Kind.SEQUENCE, FENCE),
        Held(Kind.BLOCKS, FENCE, 5),
    ],
    P: [Held(Kind.HAND_OVER, FENCE, peer=D), Held(Kind.SEQUENCE, FENCE), Held(Kind.BLOCKS, FENCE, 4)],
}


def look(more: dict[Incarnation, Sequence[Held]] | None = None, replicas: dict[int, str] | None = None) -> Look:
    rows = []
    for pid, (life, name) in enumerate(NAMES.items(), 100):
        role = name.split("-")[0]
        ledger = Ledger(name, role, life, [*SESSIONS[life], *(more or {}).get(life, [])])
        rows.append(Registered(name, role, life, pid, ledger))
    return Look(rows, replicas or {})


def only(found: list[Leftover]) -> Leftover:
    (left,) = found
    return left


def test_a_cluster_at_rest_is_clean() -> None:
    resting = look(replicas={100: "orchestrator", 101: "decode", 102: "prefill"})
    assert resting.at_rest and leftovers(resting) == []


def test_a_request_on_its_way_is_work_and_no_leftover() -> None:
    busy = look(FLYING)
    assert not busy.at_rest and leftovers(busy) == []


@pytest.mark.parametrize("kind", sorted({*COUNTERPARTS, *OWNERS}))
def test_every_half_of_a_pair_is_missed(kind: Kind) -> None:
    """Whatever must be matched by something else is named once that is gone."""
    for life, rows in FLYING.items():
        for row in (row for row in rows if row.kind is kind):
            alone = leftovers(look({life: [row]}))
            assert {(left.process, left.what, left.owner) for left in alone} == {(NAMES[life], kind.value, row.owner)}


def test_a_flight_on_a_dead_incarnation_is_named() -> None:
    rows = [Held(Kind.FLIGHT, "r"), Held(Kind.DISPATCHED, FENCE, peer=GONE)]
    left = only(leftovers(look({R: rows})))
    assert left.what == "dispatched" and "stands in no registry" in left.problem


def test_an_attempt_that_no_orchestrator_knows_is_named_with_its_blocks() -> None:
    rows = [Held(Kind.ATTEMPT, FENCE, peer=R), Held(Kind.BLOCKS, FENCE, 5)]
    left = only(leftovers(look({D: rows})))
    assert left.what == "attempt" and "unknown to orchestrator-1" in str(left)


def test_blocks_without_an_owner_are_counted() -> None:
    left = only(leftovers(look({D: [Held(Kind.BLOCKS, "", 7, note="held by nobody, on replica 0")]})))
    assert "(7)" in left.problem and "held by nobody" in left.problem


def test_a_session_with_somebody_unregistered_is_a_process_without_a_row() -> None:
    left = only(leftovers(look({D: [Held(Kind.SESSION, "orchestrator-2", peer=GONE)]})))
    assert left.what == "session" and left.owner == "orchestrator-2"


def test_a_row_without_a_process_and_a_process_without_a_row_are_named() -> None:
    dead = Registered("decode-2", "decode", GONE, 99, None, "does not answer at 127.0.0.1:1")
    seen = look(replicas={101: "decode", 555: "ServeReplica:pronghorn:decode"})
    seen = msgspec.structs.replace(seen, registered=[*seen.registered, dead])
    assert [(left.what, left.owner) for left in leftovers(seen)] == [("row", GONE), ("process", "555")]
    assert not seen.at_rest


def test_a_silent_engine_is_no_proof_of_rest() -> None:
    silent = Registered("decode-1", "decode", D, 1, Ledger("decode-1", "decode", D, [], engine_answered=False))
    assert only(leftovers(Look([silent]))).what == "engine"


def test_only_what_two_looks_find_lasts() -> None:
    a, b, c = (Leftover("decode-1", "attempt", owner, "x") for owner in "abc")
    assert lasting([a, b], [b, c]) == [b]


def test_every_kind_of_a_request_can_be_missed() -> None:
    judged = {*COUNTERPARTS, *OWNERS}
    assert set(Kind) - STANDING - judged == {Kind.FLIGHT, Kind.UNSAID, Kind.HOLD}
