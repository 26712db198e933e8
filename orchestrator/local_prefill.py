"""Which decode nodes may compute a prompt themselves where no prefill node can be asked.

Pure. Prompts that decode nodes compute hold up the streams that they serve, so that there is a bound on them
(`DecodeNodeConfig.max_local_prefill_tokens`); without it the loss of the prefill pool would take the decode pool along.
In a cluster that has no prefill pool by design, decode nodes compute everything and nothing is asked here.
"""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.nodes import NodeView


def with_room(nodes: Sequence[NodeView], prompt_tokens: int) -> list[NodeView]:
    """The nodes as a router may see them: without a usable prefill node, decode nodes that have no room for the prompt
    are unusable, too."""
    if any(node.role == "prefill" and node.unusable is None for node in nodes):
        return list(nodes)
    return [_judged(node, prompt_tokens) for node in nodes]


def _judged(node: NodeView, prompt_tokens: int) -> NodeView:
    room_tokens = node.local_prefill_room_tokens
    if node.role != "decode" or node.unusable is not None or room_tokens is None or prompt_tokens <= room_tokens:
        return node
    room = f"room to compute {room_tokens} prompt tokens, the request needs {prompt_tokens}"
    return replace(node, unusable=f"no prefill node is usable, and it has {room}")
