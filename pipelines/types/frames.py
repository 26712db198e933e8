"""What an orchestrator and a node say on their one long-lived stream (`pronghorn.wire.SESSION_METHOD`).

The first message each way is a protobuf `Hello` (`kvcache/handshake.py`); every later one is a msgpack frame of this
file. A node sends one `Outputs` per engine step with the tokens of every sequence of that orchestrator: a message per
token costs forty times more. The same stream carries load, and block events: what the node has cached, first whole,
then each change, numbered, so that a broken stream or a gap in the numbers is the gap.
"""

import msgspec

from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pronghorn.errors import ErrorRecord
from pronghorn.ids import Fence, Incarnation, NodeName

# --- orchestrator -> node --------------------------------------------------------------------------------------------


class PrefillTarget(msgspec.Struct, frozen=True):
    """A prefill node as the orchestrator looked it up in the registry; never an address that a client sent."""

    name: NodeName
    address: str
    incarnation: Incarnation


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Generate. A later attempt's context may hold tokens that were delivered already, as after `TextContext.reset`:
    they are prompt to compute, and what comes is the token after them.

    Prefill is asked of `prefill` in turn; where all fail the decode node computes the prompt itself.

    An empty list means: prefill on the decode node. With `only_these` there is no local fallback: the client named
    the node, and gets it or a typed error.
    """

    fence: Fence
    context: TextContext
    budget_s: float
    prefill: list[PrefillTarget] = []
    only_these: bool = False
    key: str | None = None
    """What the client calls the request (`X-Request-ID`). A node runs one chain of attempts of a key at a time."""
    deaths: int = 0
    """Nodes that have died under the request since it last got on; at `POISONOUS_DEATHS` it is tried no more."""


POISONOUS_DEATHS = 2


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this attempt any more: stop it and free everything. No answer comes."""

    fence: Fence


class DropPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached block that nobody holds."""


class ResendBlocks(msgspec.Struct, frozen=True, tag=True):
    """Say again, whole, what is cached: block events are missing here."""


OrchestratorFrame = Submit | Abort | DropPrefixCache | ResendBlocks

# --- node -> orchestrator --------------------------------------------------------------------------------------------


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one attempt. A status other than ACTIVE is its last word."""

    fence: Fence
    tokens: list[int]
    status: GenerationStatus = GenerationStatus.ACTIVE
    num_cached_tokens: int | None = None
    log_probabilities: list[LogProbabilities] | None = None
    choice: int = 0
    choice_status: GenerationStatus | None = None
    """How this choice ended, where others of its attempt go on."""
    prompt_log_probabilities: LogProbabilities | None = None
    fetched_bytes: dict[str, int] = {}
    """Of blocks that were brought before the prompt was computed, by source: a node's name, or a tier of the node that
    computed it. Said once of what each node brought."""


class Failure(msgspec.Struct, frozen=True):
    """The attempt's last word, an error."""

    fence: Fence
    error: ErrorRecord


class Pulled(msgspec.Struct, frozen=True):
    """A hand-over of the attempt has ended: how that prefill node did, for whoever chooses among them."""

    fence: Fence
    prefill: Incarnation
    error: ErrorRecord | None = None
    moved_bytes: int = 0
    """Of blocks, that came here, whether they could be used or not."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    deltas: list[Delta]
    failures: list[Failure] = []
    pulls: list[Pulled] = []


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every `HEARTBEAT_PERIOD_S` and on a change of health: silence on this stream is a fault."""

    report: "NodeReport"


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks of one chain can be found now, in the order of the chain."""

    parent: int | None
    """Index key of the block before the first; None where the run begins its sequence."""
    keys: bytes
    """Index keys (`kvcache.hashing.index_keys`), packed little-endian u64."""


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True):
    keys: bytes


class BlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more."""


class BlockEvents(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What has changed in a node's cache since the frame before. A hint, never a promise."""

    sequence: int
    """One more than that of the frame before on this session."""
    events: list[BlocksStored | BlocksRemoved | BlocksCleared]
    snapshot: bool = False
    """The first frame of everything that is cached: forget what this life of the node held before."""
    more: bool = False
    """The snapshot goes on in the next frame."""
    kept: dict[str, list[BlocksStored | BlocksRemoved | BlocksCleared]] = {}
    """The same of what the node could bring back, by tier ("host", "disk"): what can be found in its pool, in that
    tier, or in one that is brought back sooner (`kvcache/tier_reach.py`). Nothing where it has no tiers."""


NodeFrame = Outputs | Heartbeat | BlockEvents

HEARTBEAT_PERIOD_S = 0.25


class TierReport(msgspec.Struct, frozen=True, omit_defaults=True):
    blocks: int
    """That can be found in the pool, in that tier, or in one that is brought back sooner, as block events tell them."""
    bytes_per_s: float | None = None
    """At which blocks came back from it lately; None where none did."""


class NodeReport(msgspec.Struct, frozen=True):
    """What a node says of itself: in heartbeats, in its registry row's `load`, and to `pronghorn status`."""

    name: NodeName
    role: str
    model: str
    address: str
    incarnation: Incarnation
    healthy: bool
    in_flight: int
    """Attempts that this node holds for orchestrators or for decode nodes."""
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    waiting: int
    running: int
    awaiting_blocks: int
    draining: bool = False
    local_prefill_room_tokens: int | None = None
    """Decode: prompt tokens that it would still compute in the stead of prefill nodes; None: it is no decode node."""
    counters: dict[str, int] = {}
    """Beside what happened to requests: `batches`, `prompt_tokens` computed and `generated_tokens`, since the start."""
    prompt_throughput: float = 0.0
    """Tokens a second of the last step that had prompts in it."""
    generation_throughput: float = 0.0
    """Tokens a second of the last step."""
    queued_tokens: int = 0
    """Of prompts that it has taken, those that are not computed yet."""
    findable_blocks: int | None = None
    """Different blocks that its cache has, whose events it has sent or is about to."""
    orchestrators: int = 1
    """Those that have a session with it."""
    tiers: dict[str, TierReport] | msgspec.UnsetType = msgspec.UNSET
    """Of its cache, by name; unset where it has none."""
