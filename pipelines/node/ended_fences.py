"""The attempts that a node has let go of lately.

An engine's words about an attempt may still be on their way when the attempt ends. Begun anew under the same fence, it
would take them for its own, and read or write blocks that are somebody else's by then. So a fence is used once.
Knows fences. Invariant: bounded, the oldest are forgotten first; by then no word about them can be on its way.
"""

from pronghorn.ids import Fence

CAPACITY = 8192
"""At 200 attempts per second the last forty seconds; an engine's words wait for milliseconds."""


class EndedFences:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._fences: dict[Fence, None] = {}  # a dict for its order

    def add(self, fence: Fence) -> None:
        self._fences[fence] = None
        if len(self._fences) > self._capacity:
            del self._fences[next(iter(self._fences))]

    def __contains__(self, fence: Fence) -> bool:
        return fence in self._fences

    def __len__(self) -> int:
        return len(self._fences)
