"""What may happen to a request, and what may follow from it: the events and the deeds of `lifecycle.py`.

Plain records; no decision is made here.
"""

from dataclasses import dataclass

from pipelines.types.frames import Delta, PrefillTarget
from pipelines.types.status import GenerationStatus
from pronghorn.errors import PronghornError
from pronghorn.ids import Fence, Incarnation, NodeName

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Admitted:
    """Admission gave the request a slot."""


@dataclass(frozen=True)
class Shed:
    """Admission takes its place in the queue away: for another, or because it is too late to begin."""

    error: PronghornError


@dataclass(frozen=True)
class Routed:
    """The router's answer to Choose."""

    decode: NodeName
    incarnation: Incarnation
    prefill: tuple[PrefillTarget, ...] = ()
    only_these: bool = False


@dataclass(frozen=True)
class Unroutable:
    """The router's other answer to Choose."""

    error: PronghornError
    reconnecting: bool = False
    """Whether a decode node that was there a moment ago may be back in the next."""


@dataclass(frozen=True)
class Complete:
    """The third answer to Choose: what was delivered is all there is, and only the last word is missing."""

    status: GenerationStatus


@dataclass(frozen=True)
class Produced:
    """The node sent tokens, or its last word."""

    delta: Delta
    fresh_tokens: int | None = None
    """Those among its tokens that no earlier attempt has said; None: all."""


@dataclass(frozen=True)
class AttemptFailed:
    """The node said no, or that it failed; or the frame could not be queued for it. Its last word on that fence."""

    fence: Fence
    error: PronghornError


@dataclass(frozen=True)
class NodeGone:
    """The session with that life of a node is over: the request's own, or a prefill node's that it suspects."""

    incarnation: Incarnation
    reason: str
    died: bool = False
    """It broke as when a process dies."""


@dataclass(frozen=True)
class MachineGone:
    """The last session with a machine on which several lives of nodes ran is over."""

    lives: frozenset[Incarnation]


@dataclass(frozen=True)
class NodeUnfit:
    """The node says that it is unhealthy; its session lives."""

    incarnation: Incarnation


@dataclass(frozen=True)
class NodeHeard:
    """A life of a decode node that can be given work, or of a node in doubt, has been heard of."""

    incarnation: Incarnation


@dataclass(frozen=True)
class PrefillFailed:
    """A hand-over to the attempt failed."""

    fence: Fence
    prefill: Incarnation
    error: PronghornError
    session_up: bool
    """Whether we still have a session with that node."""


@dataclass(frozen=True)
class WaitOver:
    """It has waited for a node as long as one may."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The request's time budget is spent."""


@dataclass(frozen=True)
class StoppedEarly:
    """The API has all it wants, a stop string for example."""


@dataclass(frozen=True)
class ClientGone:
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class ShuttingDown:
    """The orchestrator leaves, and its grace is over."""


Event = (
    Admitted
    | Shed
    | Routed
    | Unroutable
    | Complete
    | Produced
    | AttemptFailed
    | NodeGone
    | MachineGone
    | NodeUnfit
    | NodeHeard
    | PrefillFailed
    | WaitOver
    | DeadlinePassed
    | StoppedEarly
    | ClientGone
    | ShuttingDown
)


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choose:
    """Ask the router for a decode node that is none of `avoid`. Answered by Routed, Unroutable or Complete."""

    avoid: frozenset[Incarnation]


@dataclass(frozen=True)
class Dispatch:
    """Send the request to the node under this fence."""

    fence: Fence
    decode: NodeName
    prefill: tuple[PrefillTarget, ...]
    only_these: bool
    deaths: int = 0
    """Nodes that have died under the request, beyond doubt, since it last got on."""


@dataclass(frozen=True)
class Wait:
    """Say NodeHeard of every life of a node that is in doubt, or that may be given work, and WaitOver in time."""

    in_doubt: bool = False
    """It waits to see which nodes have really died under it; else for a node to go on from."""


@dataclass(frozen=True)
class SendAbort:
    """Tell the node that nobody waits for this fence. Best effort: a node that cannot be reached has lost it anyway."""

    fence: Fence


@dataclass(frozen=True)
class Deliver:
    delta: Delta


@dataclass(frozen=True)
class DeliverEnd:
    """Deliver the last word, without tokens."""

    status: GenerationStatus


@dataclass(frozen=True)
class Finish:
    """Terminal: all was delivered."""


@dataclass(frozen=True)
class Fail:
    """Terminal: the one error."""

    error: PronghornError


@dataclass(frozen=True)
class Cancel:
    """Terminal: nobody to tell."""


@dataclass(frozen=True)
class ReleaseSlot:
    """Give back the slot, or the place in the queue."""


Deed = Choose | Dispatch | Wait | SendAbort | Deliver | DeliverEnd | Finish | Fail | Cancel | ReleaseSlot
