"""Which decode node gets a request, and which prefill nodes it may ask: filter, score, pick, and reserve.

Synchronous: between what it reads and what it reserves nothing else happens, so that two requests never see the same
free place. It knows the index, the policy and what was given out; nodes come in as views of this moment.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from orchestrator.nodes import NodeView
from orchestrator.routing.facts import Candidate, Choice, Pair, RequestFacts, Route
from orchestrator.routing.filters import named_prefill, usable_decode, usable_prefill
from orchestrator.routing.pick import Turn, load
from orchestrator.routing.policies import Policy, shortlist
from orchestrator.routing.reservation import Reservations
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import Clock
from pronghorn.ids import Incarnation, NodeName

SHORTLIST = 8
HINTED_HOLDERS = 8
"""Named in a request's hint at most."""


_Kept = Mapping[Incarnation, Mapping[str, int]]


class Holders(Protocol):
    """Who has what (`orchestrator/holdings.py`)."""

    def find(self, packed: bytes, among: Sequence[Incarnation] | None = None) -> dict[Incarnation, int]:
        """By life of a node, how many of the prompt's leading blocks it has. `among`: of these alone."""

    def find_kept(self, packed: bytes, among: Sequence[Incarnation]) -> Mapping[Incarnation, Mapping[str, int]]:
        """By those of these lives that have tiers, and by tier ("host", "disk"): how many leading blocks could be had
        from the pool, from that tier, or from one that is brought back sooner."""

    def find_best(self, packed: bytes, count: int) -> list[Incarnation]:
        """Lives that have most of it, about `count`."""

    def expect(self, incarnation: Incarnation, packed: bytes) -> None:
        """That node is about to have all of them."""


class Router(Protocol):
    def choose(self, request: RequestFacts, nodes: Sequence[NodeView]) -> Route:
        """Raises EndpointNotFound where `target_endpoint` names no prefill node, Unavailable where the named one, or
        every decode node, cannot be given work."""


class PolicyRouter:
    def __init__(
        self,
        policy: Policy,
        holders: Holders,
        reservations: Reservations,
        clock: Clock,
        turn: Turn,
        *,
        max_prefill_candidates: int,
        retry_after_s: float,
    ) -> None:
        self._policy = policy
        self._holders = holders
        self._reservations = reservations
        self._clock = clock
        self._turn = turn
        self._max_prefill_candidates = max_prefill_candidates
        self._retry_after_s = retry_after_s

    def choose(self, request: RequestFacts, nodes: Sequence[NodeView]) -> Route:
        nodes = [node for node in nodes if node.model == request.model]
        endpoint = request.target_endpoint
        named = None if endpoint is None else named_prefill(endpoint, nodes, self._retry_after_s)
        decode = usable_decode(request, nodes, self._retry_after_s)
        prefill = usable_prefill(nodes) if named is None else [named]
        if not self._policy.wants_all:
            most = self._holders.find_best(request.keys, SHORTLIST) if request.keys else []
            decode, prefill = shortlist(decode, most, SHORTLIST), shortlist(prefill, most, SHORTLIST)
        held, kept = self._held(request, decode, prefill)
        pairs = self._policy.pick(
            request,
            _candidates(request, decode, held, kept),
            _candidates(request, prefill, held, kept),
            forced=named is not None,
        )
        self._reserve(request, pairs[0])
        return Route(
            decode=pairs[0].decode.node,
            prefill=self._targets(pairs, prefill),
            only_these=named is not None,
            choice=Choice(self._policy.name, tuple(pairs)),
            held_blocks=_held_blocks(held, (*decode, *prefill)),
        )

    def _held(
        self, request: RequestFacts, decode: Sequence[NodeView], prefill: Sequence[NodeView]
    ) -> tuple[dict[Incarnation, int], _Kept]:
        """What lies in pools, and what could be brought back."""
        if not request.keys:
            return {}, {}
        lives = [node.incarnation for node in (*decode, *prefill)]
        return self._holders.find(request.keys, lives), self._holders.find_kept(request.keys, lives)

    def _reserve(self, request: RequestFacts, pair: Pair) -> None:
        computes = pair.prefill or pair.decode
        new_tokens = request.prompt_tokens - computes.found_tokens
        self._reservations.reserve(computes.node.incarnation, new_tokens, self._clock.now_s())
        if request.keys:
            self._holders.expect(computes.node.incarnation, request.keys)
            if pair.prefill is not None:
                self._holders.expect(pair.decode.node.incarnation, request.keys)

    def _targets(self, pairs: list[Pair], prefill: Sequence[NodeView]) -> tuple[PrefillTarget, ...]:
        """The chosen one first, then others in the order in which they would have been chosen, then by load."""
        if pairs[0].prefill is None:
            return ()
        chosen = {pair.prefill.node.incarnation: pair.prefill.node for pair in pairs if pair.prefill is not None}
        if len(chosen) < self._max_prefill_candidates:
            others = [node for node in self._turn.rotated(prefill) if node.incarnation not in chosen]
            chosen |= {node.incarnation: node for node in sorted(others, key=load)}
        return tuple(_target(node) for node in list(chosen.values())[: self._max_prefill_candidates])


def _candidates(
    request: RequestFacts, nodes: Sequence[NodeView], held: dict[Incarnation, int], kept: _Kept
) -> list[Candidate]:
    most, block_tokens = request.prompt_tokens - 1, request.block_tokens
    candidates = [Candidate(node, min(most, block_tokens * held.get(node.incarnation, 0))) for node in nodes]
    return (
        [_with_tiers(c, kept.get(c.node.incarnation, {}), most, block_tokens) for c in candidates]
        if kept
        else candidates
    )


def _with_tiers(c: Candidate, kept: Mapping[str, int], most: int, block_tokens: int) -> Candidate:
    """What the pool has already, or is about to have, need not be brought back."""
    host = max(c.reuse_tokens, min(most, block_tokens * kept.get("host", 0)))
    disk = max(host, min(most, block_tokens * kept.get("disk", 0)))
    return c._replace(host_tokens=host - c.reuse_tokens, disk_tokens=disk - host)


def _held_blocks(held: dict[Incarnation, int], nodes: Sequence[NodeView]) -> tuple[tuple[NodeName, int], ...]:
    if not held:
        return ()
    found = [(node.name, held[node.incarnation]) for node in nodes if node.incarnation in held]
    return tuple(sorted(found, key=lambda holder: -holder[1])[:HINTED_HOLDERS])


def _target(node: NodeView) -> PrefillTarget:
    return PrefillTarget(node.name, node.address, node.incarnation)
