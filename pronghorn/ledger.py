"""What a process holds: the words in which every room says it, and nobody has to guess.

Knows kinds and counts; never the things themselves. Whoever holds something answers with `Held` rows when asked; a
ledger is a snapshot, made anew each time, and changes nothing. Kinds that are not `STANDING` are of requests: in a
process that has none there is no row of them, and one that stays is a leak.
"""

from enum import StrEnum

import msgspec

from pronghorn.ids import Incarnation


class Kind(StrEnum):
    # An engine's.
    BLOCKS = "blocks"
    SEQUENCE = "sequence"
    # A node's.
    ATTEMPT = "attempt"
    PULL = "pull"
    HAND_OVER = "hand_over"
    UNSAID = "unsaid"
    CHANNEL = "channel"
    HOLD = "hold"
    # An orchestrator's.
    FLIGHT = "flight"
    DISPATCHED = "dispatched"
    SLOT = "slot"
    QUEUE_PLACE = "queue_place"
    TIMER = "timer"
    UNREAD = "unread"
    # Everybody's.
    SESSION = "session"
    TASK = "task"


MEANING: dict[Kind, str] = {
    Kind.BLOCKS: "KV blocks held for one attempt, in its engine",
    Kind.SEQUENCE: "an attempt in its engine; the note is its state there",
    Kind.ATTEMPT: "an attempt on its decode node, for the orchestrator `peer`; the note is its state",
    Kind.PULL: "an open hand-over stream of a decode node; `peer` is the prefill node",
    Kind.HAND_OVER: "a hand-over on its prefill node, for the decode node `peer`; the note is its state",
    Kind.UNSAID: "outputs that wait for the session with `peer`",
    Kind.CHANNEL: "an open channel from a decode node to a prefill node",
    Kind.HOLD: "blocks that a node's engine holds for a fetch or a tier, by or for this node",
    Kind.FLIGHT: "a request in its orchestrator; the note is its state",
    Kind.DISPATCHED: "an attempt that its orchestrator has given to the decode node `peer`",
    Kind.SLOT: "a request's place among those that run",
    Kind.QUEUE_PLACE: "a request's place among those that wait",
    Kind.TIMER: "the timer of a request's deadline",
    Kind.UNREAD: "outputs that wait for a request's client",
    Kind.SESSION: "a session with `peer`",
    Kind.TASK: "a task of the process; the owner is its name",
}

STANDING = frozenset({Kind.CHANNEL, Kind.SESSION, Kind.TASK})
"""Kinds that a process holds at rest too."""


class Held(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Kind
    owner: str
    """Whose it is: a fence or a request id; of a standing kind a name."""
    count: int = 1
    """In the kind's own unit: blocks, outputs, or things of the kind."""
    age_s: float | None = None
    """How long it is held; None where its holder keeps no time."""
    peer: Incarnation | None = None
    """The life of the process at its other end, where it has one."""
    note: str = ""


class Ledger(msgspec.Struct, frozen=True):
    """Everything that one life of a process holds, at one moment."""

    name: str
    role: str
    incarnation: Incarnation
    held: list[Held]
    engine_answered: bool = True
    """Whether a node's engine said what it holds; else its rows are missing."""

    def of(self, *kinds: Kind) -> list[Held]:
        return [held for held in self.held if held.kind in kinds]

    @property
    def at_rest(self) -> bool:
        return self.engine_answered and all(held.kind in STANDING for held in self.held)


def counts(held: list[Held]) -> dict[Kind, int]:
    """The count of every kind, 0 where nothing of it is held."""
    found = dict.fromkeys(Kind, 0)
    for row in held:
        found[row.kind] += row.count
    return found
