"""Which nodes may do which part of a request; the others are never scored.

Pure. A client's `target_endpoint` selects among the nodes that are known and is obeyed exactly, or refused by name;
nothing that a client wrote becomes an address.
"""

from collections.abc import Sequence

from orchestrator.nodes import NodeView
from orchestrator.routing.facts import RequestFacts
from pronghorn.errors import EndpointNotFound, Unavailable

TCP_SCHEME = "tcp://"


def is_named(endpoint: str, node: NodeView) -> bool:
    """Whether that is what a client calls the node."""
    return endpoint in (node.name, TCP_SCHEME + node.address)


def named_prefill(endpoint: str, nodes: Sequence[NodeView], retry_after_s: float) -> NodeView:
    """Raises EndpointNotFound where it names no prefill node, Unavailable where the named one cannot be given work."""
    matches = [node for node in nodes if is_named(endpoint, node)]
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
            retry_after_s=retry_after_s,
        )
    return node


def usable_decode(request: RequestFacts, nodes: Sequence[NodeView], retry_after_s: float) -> list[NodeView]:
    """At least one. Raises Unavailable, saying of each why not."""
    avoid = request.avoid
    usable = [n for n in nodes if n.unusable is None and n.role == "decode" and n.incarnation not in avoid]
    if not usable:
        decode = [node for node in nodes if node.role == "decode"]
        why = "; ".join(f"{node.name}: {node.unusable or 'failed this request'}" for node in decode)
        raise Unavailable(
            f"no decode node can take the request ({why or 'none is registered'})", retry_after_s=retry_after_s
        )
    return usable


def usable_prefill(nodes: Sequence[NodeView]) -> list[NodeView]:
    return [node for node in nodes if node.unusable is None and node.role == "prefill"]
