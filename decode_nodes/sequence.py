"""One sequence on a decode node: its states, what moves it between them, and who may touch its blocks in each.

    (new) --> WAITING --reserve--> PULLING --adopt--> DECODING --finish--> (gone)
                 |  ^                 |--prefill here--> PREFILLING
                 |  '---- preempt ----+------ DECODING, PREFILLING
                 '--reserve here--> PREFILLING --prompt done--> DECODING
                                      PULLING --fail--> CONDEMNED --release--> (gone)

Another choice of a request begins with the first tokens: WAITING --fork--> DECODING where there is room for it beside
the first one, whose blocks it shares; else it waits as one that was preempted does.

`Release` ends every state. A failure ends every state but PULLING at once: there the shell may still be writing, so
that the blocks stay held until it says `Release`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from pipelines.runtime.replica import Chain, Replica, Stage
from pipelines.types.text_context import TextContext
from pronghorn.deadline import Deadline
from pronghorn.ids import Fence


class State(Enum):
    WAITING = auto()
    """Holds no block."""
    PULLING = auto()
    """Holds its blocks; the shell is writing them."""
    PREFILLING = auto()
    """Its prompt is computed here, chunk by chunk."""
    DECODING = auto()
    CONDEMNED = auto()
    """Has failed; holds its blocks because the shell may still be writing them."""
    GONE = auto()


class Event(Enum):
    RESERVE = auto()
    RESERVE_HERE = auto()
    FORK = auto()
    ADOPT = auto()
    PREFILL_HERE = auto()
    PROMPT_DONE = auto()
    PREEMPT = auto()
    FAIL = auto()
    FINISH = auto()
    RELEASE = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.RESERVE): State.PULLING,
    (State.WAITING, Event.RESERVE_HERE): State.PREFILLING,
    (State.WAITING, Event.FORK): State.DECODING,
    (State.WAITING, Event.FINISH): State.GONE,
    (State.WAITING, Event.FAIL): State.GONE,
    (State.WAITING, Event.RELEASE): State.GONE,
    (State.PULLING, Event.ADOPT): State.DECODING,
    (State.PULLING, Event.PREFILL_HERE): State.PREFILLING,
    (State.PULLING, Event.FINISH): State.GONE,
    (State.PULLING, Event.FAIL): State.CONDEMNED,
    (State.PULLING, Event.RELEASE): State.GONE,
    (State.PREFILLING, Event.PROMPT_DONE): State.DECODING,
    (State.PREFILLING, Event.PREEMPT): State.WAITING,
    (State.PREFILLING, Event.FAIL): State.GONE,
    (State.PREFILLING, Event.RELEASE): State.GONE,
    (State.DECODING, Event.PREEMPT): State.WAITING,
    (State.DECODING, Event.FINISH): State.GONE,
    (State.DECODING, Event.FAIL): State.GONE,
    (State.DECODING, Event.RELEASE): State.GONE,
    (State.CONDEMNED, Event.RELEASE): State.GONE,
}

RUNNING = frozenset({State.PREFILLING, State.DECODING})

STAGES = {State.PULLING: Stage.PULLED, State.PREFILLING: Stage.PROMPT, State.DECODING: Stage.DECODING}
"""The queue of its replica in which a sequence stands; in every other state it takes no slot."""


@dataclass(eq=False)
class Family:
    """The sequences of a request for several choices, from its first tokens on: those that have not ended."""

    fence: Fence
    """The request's: what is said of any of them is said under it."""
    members: list["Sequence"]


@dataclass(eq=False)
class Sequence:
    fence: Fence
    """Its own: a choice other than the first is a request of its own to the pools and the pipeline."""
    context: TextContext
    deadline: Deadline
    prefill_here: bool
    """Where its prompt is computed once it has blocks; preemption makes it true."""
    arrival: int
    """Its place in the order of those that came; preemption does not change it."""
    chain: Chain = field(default_factory=Chain)
    state: State = State.WAITING
    replica: "Replica[Sequence] | None" = None
    """Where its blocks are, while it holds any."""
    reported: bool = False
    """Whether a `TokenDelta` has left, and with it the number of cached tokens."""
    choice: int = 0
    family: Family | None = None
    since_s: float = 0.0
    """When it came, on the engine's clock."""

    @property
    def said_as(self) -> Fence:
        return self.fence if self.family is None else self.family.fence

    @property
    def order(self) -> tuple[int, int, int]:
        """The newest of the least urgent is the first to be preempted."""
        return self.context.priority, self.arrival, self.choice

    @property
    def uncomputed_tokens(self) -> int:
        """Of its prompt, where that is computed here."""
        here = self.state is State.PREFILLING or (self.state is State.WAITING and self.prefill_here)
        return len(self.context.tokens) - self.context.tokens.processed_length if here else 0

    def apply(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
