"""Where else cached blocks could come from than this node's own pool, and go to: the port, and the version that has
nowhere. Other versions: `dkv_connector.py` (other nodes), `tiers.py` (this host's memory and disk),
`layered_connector.py` (one before another).

A hint names who holds which blocks. It comes with a request, from a client or from the router, and is trusted for
nothing: it selects among registered nodes, and the blocks asked for are those that the node's own hashes name. A hint
that is absent, unreadable or stale is a cache miss and a count, never an error.

Schema, version 1:

    {"version": 1, "instances": [{"name": "decode-3f2a", "blocks": 12, "last_hash": "9c1f..."}]}

`name` is a registered node, which holds the first `blocks` blocks of the sequence; `last_hash` is the hash of the last
of them in hex (`BlockHasher.short`).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from kvcache.hashing import BlockHash
from pronghorn.counters import Counters

HINT_VERSION = 1
MAX_HINT_INSTANCES = 64


class HintOutcome(StrEnum):
    ABSENT = "absent"
    MALFORMED = "malformed"
    WRONG_VERSION = "wrong_version"
    UNKNOWN_INSTANCE = "unknown_instance"
    """Not one of its instances is registered."""
    USABLE = "usable"


class HintInstance(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    blocks: Annotated[int, msgspec.Meta(ge=0)]
    last_hash: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16}|[0-9a-f]{64})$")]


class CacheHint(msgspec.Struct, frozen=True):
    version: int
    instances: Annotated[list[HintInstance], msgspec.Meta(max_length=MAX_HINT_INSTANCES)]


def read_hint(
    metadata: Mapping[str, Any] | None, known: Container[str] | None = None
) -> tuple[HintOutcome, CacheHint | None]:
    """What became of the hint, and the hint where it can be used, with only the instances in `known`. Raises nothing.

    `known` are the names of the registered nodes; None stands for any name.
    """
    if metadata is None:
        return HintOutcome.ABSENT, None
    try:
        hint = msgspec.convert(metadata, CacheHint)
    except msgspec.ValidationError:
        version = metadata.get("version") if isinstance(metadata, Mapping) else None
        newer = type(version) is int and version != HINT_VERSION
        return HintOutcome.WRONG_VERSION if newer else HintOutcome.MALFORMED, None
    if hint.version != HINT_VERSION:
        return HintOutcome.WRONG_VERSION, None
    instances = [instance for instance in hint.instances if known is None or instance.name in known]
    if not instances:
        return HintOutcome.UNKNOWN_INSTANCE, None
    return HintOutcome.USABLE, CacheHint(hint.version, instances)


def without(metadata: Mapping[str, Any] | None, names: Container[str]) -> Mapping[str, Any] | None:
    """The hint less the instances of these names; None where no other is left. What cannot be read stays as it is."""
    hint = parse_hint(metadata)
    if hint is None:
        return metadata
    left = [instance for instance in hint.instances if instance.name not in names]
    return msgspec.to_builtins(CacheHint(hint.version, left)) if left else None


def parse_hint(metadata: Mapping[str, Any] | None) -> CacheHint | None:
    """The hint where it has the right shape and version, else None. Raises nothing."""
    return read_hint(metadata)[1]


@dataclass(frozen=True)
class Located:
    """Where the blocks that lead a chain could be had. Advice, not a reservation."""

    blocks: int
    """How many of the first could be had, those that the asker has itself included."""
    sources: Sequence[object] = ()
    """The connector's own."""


class Landed(NamedTuple):
    """What a load has brought."""

    blocks: int
    """Of the first that were asked for: there, and verified."""
    size_bytes: Mapping[str, int] = {}
    """That came, whether they could be used or not, by source: a node's name, or a tier."""


class KVConnector(Protocol):
    """Where blocks could come from, and go to, beside this node's own pool. Lives in the node's shell.

    Hashes are a sequence's chain from its start, all of its full blocks. No method raises: whatever goes wrong is a
    miss, with a counter.
    """

    def may_have(self, metadata: Mapping[str, Any] | None) -> bool:
        """Whether `lookup` can find anything at all for a request with this hint. Costs nothing."""

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        """What could be had that is cheaper to bring than to compute, beyond the first `known`, which are here. Waits a
        bounded, short time at most. `metadata` is the request's hint as it came."""

    async def load(
        self,
        located: Located,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Landed:
        """Write the blocks from position `start` on into `destinations`, within `budget_s`; what has come. Nothing is
        written after it has returned or was cancelled."""

    @property
    def keeps(self) -> bool:
        """Whether `offload` takes anything."""

    def has(self, block_hash: BlockHash) -> bool:
        """Whether `offload` took it, and it is still kept."""

    def offload(self, parent: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        """Take copies of these blocks of one chain, which follow `parent` (None: the chain begins with them), as many
        of the first as fit; how many of the first are kept now. None where `parent` is not kept: nobody could find
        them. What goes for them is the end of a chain. The memory is the caller's again on return."""

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """A sequence that begins with these blocks was asked for: keep them longer than others."""

    def poll(self) -> int:
        """Transfers of its own that go on in the background."""

    def reset(self) -> None:
        """Forget everything that is kept."""

    async def close(self) -> None: ...


class NullConnector:
    """Nothing comes from elsewhere. Counts each hint that it was given as `cache_hint_miss.<reason>`."""

    NO_CONNECTOR = "no_connector"
    """The reason where the hint itself was fine."""

    def __init__(self, counters: Counters, known: Callable[[], Container[str]] | None = None) -> None:
        """`known` gives the names of the registered nodes at that moment."""
        self._counters = counters
        self._known = known

    keeps = False

    def may_have(self, metadata: Mapping[str, Any] | None) -> bool:
        outcome, _ = read_hint(metadata, self._known() if self._known is not None else None)
        if outcome is not HintOutcome.ABSENT:
            reason = self.NO_CONNECTOR if outcome is HintOutcome.USABLE else outcome.value
            self._counters.count("cache_hint_miss", reason)
        return False

    async def lookup(self, hashes: Sequence[BlockHash], known: int, metadata: Mapping[str, Any] | None) -> Located:
        return Located(known)

    async def load(
        self,
        located: Located,
        hashes: Sequence[BlockHash],
        start: int,
        destinations: Sequence[memoryview],
        budget_s: float,
    ) -> Landed:
        return Landed(0)

    def has(self, block_hash: BlockHash) -> bool:
        return False

    def offload(self, parent: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        return 0

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Nothing is kept."""

    def poll(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""
