"""One prompt on a prefill node: its states, what moves it between them, and who may touch its blocks in each.

    (new) --> WAITING --reserve--> COMPUTING --first token--> SERVING --release--> (gone)
                                   COMPUTING --fail, blocks reported--> CONDEMNED --release--> (gone)
                                     SERVING --fail--------------------> CONDEMNED

`Release` ends every state. A failure ends WAITING, and COMPUTING before any block was reported, at once; afterwards the
shell may be reading, so that the blocks stay held until it says `Release`.
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
    COMPUTING = auto()
    """Holds its blocks; the shell may read those that were reported."""
    SERVING = auto()
    """Computed; the shell may be reading its blocks."""
    CONDEMNED = auto()
    """Has failed; holds its blocks because the shell may still be reading them."""
    GONE = auto()


class Event(Enum):
    RESERVE = auto()
    FIRST_TOKEN = auto()
    FAIL = auto()
    CONDEMN = auto()
    """A failure while the shell may be reading."""
    RELEASE = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.RESERVE): State.COMPUTING,
    (State.WAITING, Event.FAIL): State.GONE,
    (State.WAITING, Event.RELEASE): State.GONE,
    (State.COMPUTING, Event.FIRST_TOKEN): State.SERVING,
    (State.COMPUTING, Event.FAIL): State.GONE,
    (State.COMPUTING, Event.CONDEMN): State.CONDEMNED,
    (State.COMPUTING, Event.RELEASE): State.GONE,
    (State.SERVING, Event.CONDEMN): State.CONDEMNED,
    (State.SERVING, Event.RELEASE): State.GONE,
    (State.CONDEMNED, Event.RELEASE): State.GONE,
}

STAGES = {State.COMPUTING: Stage.PROMPT}
"""The queue of its replica in which a prompt stands; in every other state it takes no slot."""


@dataclass(eq=False)
class Prompt:
    fence: Fence
    context: TextContext
    deadline: Deadline
    wanted: list[int]
    """Block positions asked for and not yet reported, ascending."""
    arrival: int
    """Its place in the order of those that came."""
    chain: Chain = field(default_factory=Chain)
    prompt_tokens: int = field(init=False)
    state: State = State.WAITING
    replica: "Replica[Prompt] | None" = None
    """Where its blocks are, once it has them."""
    read: bool = False
    """Whether a `ChunkReady` has left: the shell may be reading."""
    since_s: float = 0.0
    """When it came, on the engine's clock."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.context.tokens)

    @property
    def uncomputed_tokens(self) -> int:
        if self.state is not State.WAITING and self.state is not State.COMPUTING:
            return 0
        return self.prompt_tokens - self.context.tokens.processed_length

    def apply(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def take_complete(self, block_tokens: int) -> list[int]:
        """The wanted positions whose KV is complete, the prompt's partial last block included once all is computed.
        They count as reported from now on."""
        computed_tokens = self.context.tokens.processed_length
        complete = [p for p in self.wanted if min((p + 1) * block_tokens, self.prompt_tokens) <= computed_tokens]
        self.wanted = self.wanted[len(complete) :]
        return complete
