"""Work that was just given out and that no heartbeat tells of yet.

Pure; the time comes in. A node's heartbeat tells its load from all orchestrators together; what this one has added
since is counted here, from the moment of the choice, so that a burst sees its own first requests. A reservation counts
until a heartbeat that comes `SETTLES_S` after it: by then the node had the request.
"""

from collections import deque
from dataclasses import dataclass, field

from pronghorn.ids import Incarnation

SETTLES_S = 0.15


@dataclass
class _Pending:
    tokens: int = 0
    made: "deque[tuple[float, int]]" = field(default_factory=deque)
    """When, and the tokens, the oldest first."""


class Reservations:
    def __init__(self) -> None:
        self._nodes: dict[Incarnation, _Pending] = {}
        self._changed: dict[Incarnation, None] = {}

    def reserve(self, incarnation: Incarnation, tokens: int, now_s: float) -> None:
        """The node is to compute so many tokens of a prompt."""
        self._changed[incarnation] = None
        pending = self._nodes.setdefault(incarnation, _Pending())
        pending.tokens += tokens
        pending.made.append((now_s, tokens))

    def heard(self, incarnation: Incarnation, now_s: float) -> None:
        """A heartbeat came."""
        pending = self._nodes.get(incarnation)
        if pending is None:
            return
        while pending.made and now_s - pending.made[0][0] >= SETTLES_S:
            pending.tokens -= pending.made.popleft()[1]
        if not pending.made:
            del self._nodes[incarnation]

    def release(self, incarnation: Incarnation) -> None:
        """One of the requests given out is over, whether or not a heartbeat has told of it: the oldest, as a guess."""
        pending = self._nodes.get(incarnation)
        if pending is not None:
            self._changed[incarnation] = None
            pending.tokens -= pending.made.popleft()[1]
            if not pending.made:
                del self._nodes[incarnation]

    def forget(self, incarnation: Incarnation) -> None:
        self._nodes.pop(incarnation, None)

    def take_changed(self) -> list[Incarnation]:
        """Nodes that were given something since the last call, or are done with it."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def tokens(self, incarnation: Incarnation) -> int:
        pending = self._nodes.get(incarnation)
        return 0 if pending is None else pending.tokens

    def requests(self, incarnation: Incarnation) -> int:
        pending = self._nodes.get(incarnation)
        return 0 if pending is None else len(pending.made)
