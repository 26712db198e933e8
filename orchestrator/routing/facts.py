"""What a router knows when it chooses, and what it answers.

Plain records; nothing here decides.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.nodes import NodeView
from pipelines.types.frames import PrefillTarget
from pronghorn.ids import Incarnation, NodeName


@dataclass(frozen=True)
class RequestFacts:
    """What a router may know of a request."""

    model: str
    prompt_tokens: int
    target_endpoint: str | None = None
    avoid: frozenset[Incarnation] = frozenset()
    """Lives of decode nodes that have failed this request already."""
    keys: bytes = b""
    """Index keys of the prompt's full blocks (`kvcache.hashing.index_keys`); empty where nobody knows them."""
    block_tokens: int = 16
    session: str | None = None
    """What the client's requests of one conversation have in common."""


class Candidate(NamedTuple):
    """A node that could do its part of a request."""

    node: NodeView
    reuse_tokens: int = 0
    """Of the prompt, what its pool is thought to hold; never the last token."""
    host_tokens: int = 0
    """Of the prompt, what follows and could be brought back from the node's memory."""
    disk_tokens: int = 0
    """What follows that, and could be brought back from its disk."""

    @property
    def found_tokens(self) -> int:
        """What it need not compute. What it pulls from another it pulls without looking into its tiers."""
        return self.reuse_tokens + self.host_tokens + self.disk_tokens


@dataclass(frozen=True)
class Pair:
    """One way to serve a request, and how it was judged."""

    decode: Candidate
    prefill: Candidate | None
    """None: the decode node computes the prompt."""
    predicted_s: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """By scorer, each in [0, 1], 1 being best."""


@dataclass(frozen=True)
class Choice:
    """Why a route is what it is."""

    policy: str
    considered: tuple[Pair, ...]
    """The best few, the chosen one first."""

    @property
    def reuse_tokens(self) -> int:
        """What the node that computes the prompt is thought to have of it, in its pool or its tiers."""
        best = self.considered[0]
        return (best.prefill or best.decode).found_tokens


@dataclass(frozen=True)
class Route:
    decode: NodeView
    prefill: tuple[PrefillTarget, ...] = ()
    """To be asked in turn. Empty: the decode node computes the prompt."""
    only_these: bool = False
    """The client named the prefill node: no other, and no local prefill either."""
    choice: Choice | None = None
    held_blocks: tuple[tuple[NodeName, int], ...] = ()
    """Who is thought to hold how many of the prompt's leading blocks, the most first."""
