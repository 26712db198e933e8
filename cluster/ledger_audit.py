"""What does not add up between the ledgers of a cluster's processes and the rows of its registry.

Pure: one look in, leftovers out. One look proves nothing while the cluster works, since its parts are asked one after
the other; what two looks say is no accident. Knows the ledger's kinds and who must agree with whom:

    a node's attempt        an orchestrator has dispatched it
    a dispatched attempt    its node lives and holds it
    a hand-over, a pull     the node at the other end lives and holds the other one
    blocks, sequences       the shell of the same node holds the attempt, or a hold
    slots, places, timers   the same orchestrator has the flight
    a row                   its process answers, as that life
    a replica's process     it stands in the registry, as does whoever holds a session
"""

from collections.abc import Iterator

import msgspec

from pronghorn.ids import Incarnation
from pronghorn.ledger import Held, Kind, Ledger


class Registered(msgspec.Struct, frozen=True):
    """A row, and what the process that it names said."""

    name: str
    role: str
    incarnation: Incarnation
    pid: int
    ledger: Ledger | None
    problem: str = ""
    """Why there is no ledger."""


class Look(msgspec.Struct, frozen=True):
    registered: list[Registered]
    replicas: dict[int, str] = {}
    """Processes of this machine that are replicas of the cluster: pid and title."""

    @property
    def at_rest(self) -> bool:
        return all(process.ledger is not None and process.ledger.at_rest for process in self.registered)

    def ledger(self, life: Incarnation | None) -> Ledger | None:
        return next((p.ledger for p in self.registered if p.incarnation == life), None)

    def lives(self) -> set[Incarnation]:
        return {process.incarnation for process in self.registered}


class Leftover(msgspec.Struct, frozen=True):
    process: str
    what: str
    """A kind of the ledger, or "row", "process", "engine"."""
    owner: str
    problem: str

    def __str__(self) -> str:
        return f"{self.process}: {self.what} {self.owner} {self.problem}".replace("  ", " ")


COUNTERPARTS: dict[Kind, Kind] = {
    Kind.ATTEMPT: Kind.DISPATCHED,
    Kind.DISPATCHED: Kind.ATTEMPT,
    Kind.HAND_OVER: Kind.PULL,
    Kind.PULL: Kind.HAND_OVER,
}
"""What the process at the other end must hold under the same owner."""

OWNERS: dict[Kind, tuple[Kind, ...]] = {
    Kind.BLOCKS: (Kind.ATTEMPT, Kind.HAND_OVER, Kind.HOLD),
    Kind.SEQUENCE: (Kind.ATTEMPT, Kind.HAND_OVER),
    Kind.PULL: (Kind.ATTEMPT,),
    Kind.SLOT: (Kind.FLIGHT,),
    Kind.QUEUE_PLACE: (Kind.FLIGHT,),
    Kind.TIMER: (Kind.FLIGHT,),
    Kind.UNREAD: (Kind.FLIGHT,),
}
"""What the same process must hold under the same owner."""


def leftovers(look: Look) -> list[Leftover]:
    found = [_of_row(process) for process in look.registered if process.ledger is None]
    pids = {process.pid for process in look.registered}
    for pid, title in look.replicas.items():
        if pid not in pids:
            found.append(Leftover(title, "process", str(pid), "runs, and stands in no registry"))
    for process in look.registered:
        if process.ledger is not None:
            found += _of_ledger(look, process.ledger)
    return found


def lasting(before: list[Leftover], after: list[Leftover]) -> list[Leftover]:
    """Those of `after` that were there `before` already."""
    keys = {(left.process, left.what, left.owner) for left in before}
    return [left for left in after if (left.process, left.what, left.owner) in keys]


def _of_row(process: Registered) -> Leftover:
    return Leftover(process.name, "row", process.incarnation, f"stands in the registry, and {process.problem}")


def _of_ledger(look: Look, ledger: Ledger) -> Iterator[Leftover]:
    if not ledger.engine_answered:
        yield Leftover(ledger.name, "engine", "", "does not say what it holds")
    for row in ledger.held:
        problem = _without_owner(ledger, row) or _without_counterpart(look, row)
        if problem is not None:
            yield Leftover(ledger.name, row.kind.value, row.owner, problem)


def _without_owner(ledger: Ledger, row: Held) -> str | None:
    owners = OWNERS.get(row.kind)
    if owners is None or any(other.owner == row.owner for other in ledger.of(*owners)):
        return None
    return f"({row.count}) belongs to nothing that is held there {row.note}".rstrip()


def _without_counterpart(look: Look, row: Held) -> str | None:
    if row.peer is None:
        return None
    if row.peer not in look.lives():
        return f"is with {row.peer[:8]}, which stands in no registry"
    counterpart, peer = COUNTERPARTS.get(row.kind), look.ledger(row.peer)
    if counterpart is None or peer is None or any(other.owner == row.owner for other in peer.of(counterpart)):
        return None
    return f"is unknown to {peer.name}, which should hold its {counterpart.value}"
