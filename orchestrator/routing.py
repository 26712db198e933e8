"""Which decode node gets a request, and which prefill nodes it may ask.

Pure: a request's facts and the nodes of this moment come in, a route comes out. A client's `target_endpoint` selects
among these nodes and is obeyed exactly, or refused by name; nothing that a client wrote becomes an address.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.nodes import NodeView
from pipelines.types.frames import PrefillTarget
from pronghorn.errors import EndpointNotFound, Unavailable
from pronghorn.ids import Incarnation

TCP_SCHEME = "tcp://"


@dataclass(frozen=True)
class RequestFacts:
    """What a router may know of a request."""

    model: str
    prompt_tokens: int
    target_endpoint: str | None = None
    avoid: frozenset[Incarnation] = frozenset()
    """Lives of decode nodes that have failed this request already."""


@dataclass(frozen=True)
class Route:
    decode: NodeView
    prefill: tuple[PrefillTarget, ...] = ()
    """To be asked in turn. Empty: the decode node computes the prompt."""
    only_these: bool = False
    """The client named the prefill node: no other, and no local prefill either."""


class Router(Protocol):
    def choose(self, request: RequestFacts, nodes: Sequence[NodeView]) -> Route:
        """Raises EndpointNotFound where `target_endpoint` names no prefill node, Unavailable where the named one, or
        every decode node, cannot be given work."""


class LeastLoadedRouter:
    """The decode node with the fewest requests in flight, then the shortest queue, then the most free blocks.

    Equals take turns, by name. Prefill nodes are ordered the same way.
    """

    def __init__(self, max_prefill_candidates: int, retry_after_s: float) -> None:
        self._max_prefill_candidates = max_prefill_candidates
        self._retry_after_s = retry_after_s
        self._turn = 0

    def choose(self, request: RequestFacts, nodes: Sequence[NodeView]) -> Route:
        nodes = [node for node in nodes if node.model == request.model]
        named = self._named(request.target_endpoint, nodes) if request.target_endpoint is not None else None
        decode = self._decode(request, nodes)
        self._turn += 1
        if named is not None:
            return Route(decode, (_target(named),), only_these=True)
        prefill = self._by_load([node for node in nodes if node.role == "prefill" and node.unusable is None])
        return Route(decode, tuple(_target(node) for node in prefill[: self._max_prefill_candidates]))

    def _named(self, endpoint: str, nodes: Sequence[NodeView]) -> NodeView:
        matches = [n for n in nodes if endpoint == n.name or endpoint == TCP_SCHEME + n.address]
        prefill = [node for node in matches if node.role == "prefill"]
        if not prefill:
            known = ", ".join(f"{n.name} ({TCP_SCHEME}{n.address})" for n in nodes if n.role == "prefill") or "none"
            what = f"is a {matches[0].role} node" if matches else "is not registered"
            raise EndpointNotFound(
                f"target_endpoint {endpoint!r} {what}; the prefill nodes are: {known}", param="target_endpoint"
            )
        # Two lives can share an address for a moment, the older one dying.
        node = min(prefill, key=lambda n: n.unusable is not None)
        if node.unusable is not None:
            raise Unavailable(
                f"target_endpoint {endpoint!r} cannot be used now: {node.unusable}",
                param="target_endpoint",
                retry_after_s=self._retry_after_s,
            )
        return node

    def _decode(self, request: RequestFacts, nodes: Sequence[NodeView]) -> NodeView:
        decode = [node for node in nodes if node.role == "decode"]
        usable = [node for node in decode if node.unusable is None and node.incarnation not in request.avoid]
        if not usable:
            why = "; ".join(f"{node.name}: {node.unusable or 'failed this request'}" for node in decode)
            raise Unavailable(
                f"no decode node can take the request ({why or 'none is registered'})",
                retry_after_s=self._retry_after_s,
            )
        return self._by_load(usable)[0]

    def _by_load(self, nodes: Sequence[NodeView]) -> list[NodeView]:
        by_name = sorted(nodes, key=lambda node: node.name)
        turn = self._turn % max(1, len(by_name))
        rotated = by_name[turn:] + by_name[:turn]
        return sorted(rotated, key=lambda node: (node.in_flight, node.waiting, -node.free_blocks))


def _target(node: NodeView) -> PrefillTarget:
    return PrefillTarget(node.name, node.address, node.incarnation)
