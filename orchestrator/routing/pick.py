"""The best of several, and whose turn it is among equals.

Pure. Equals take turns by the number of the choice, so that many routers that see the same do not all begin with the
same node: each starts at a place of its own.
"""

from collections.abc import Callable, Sequence
from heapq import nsmallest
from random import Random
from typing import Any, TypeVar

from orchestrator.nodes import NodeView

T = TypeVar("T")


class Turn:
    def __init__(self, random: Random) -> None:
        self._count = random.randrange(1 << 16)

    def rotated(self, items: Sequence[T]) -> list[T]:
        """The same, from the one whose turn it is on; each call is the next one's turn."""
        self._count += 1
        start = self._count % max(1, len(items))
        return [*items[start:], *items[:start]]


def load(node: NodeView) -> tuple[int, int, int]:
    """Fewest in flight first, then the shortest queue, then the most free blocks."""
    return node.in_flight, node.waiting, -node.free_blocks


def least_loaded(nodes: Sequence[NodeView], count: int, key: Callable[[NodeView], Any] = load) -> list[NodeView]:
    """The first `count` by load, of equals those that stand first."""
    return nsmallest(count, nodes, key)
