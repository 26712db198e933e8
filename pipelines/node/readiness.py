"""Whether a node could do its work now: what its operations port tells, beside the health that Serve asks for.

Pure: facts and the time come in, reasons go out. Knows the node's own state, engine and pool. Must not know any peer: a
dead one never makes a node unready. A node is not ready while its engine is silent, and while its pool does not drain:
while the engine keeps attempts that the shell has let go of, or the shell keeps some that are past their deadline.
"""

from collections.abc import Container, Iterable

from pronghorn.ledger import Held, Kind


class Strays:
    """The attempts that an engine holds and its shell does not, and since when: each is a leak if it stays.

    An engine's stock tells of the past, so that one that is seen once may just have been released.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, stock: Iterable[Held], known: Container[str], now_s: float) -> None:
        """The engine's rows, and the owners that the shell holds."""
        owners = [row.owner for row in stock if row.kind in (Kind.SEQUENCE, Kind.BLOCKS) and row.owner not in known]
        self._since_s = {owner: self._since_s.get(owner, now_s) for owner in owners}

    def clear(self) -> None:
        """The engine holds nothing."""
        self._since_s = {}

    def __len__(self) -> int:
        return len(self._since_s)

    def reason(self, now_s: float, patience_s: float) -> str | None:
        old = [(since_s, owner) for owner, since_s in self._since_s.items() if now_s - since_s > patience_s]
        if not old:
            return None
        since_s, owner = min(old)
        whose = owner or "nobody"
        return f"the pool does not drain: {len(old)} leftovers, the oldest {whose}'s of {now_s - since_s:.1f} s ago"


def overdue_reason(overdue_s: float, patience_s: float) -> str | None:
    """`overdue_s`: how long the worst attempt is past its deadline."""
    return f"an attempt is {overdue_s:.1f} s past its deadline and still held" if overdue_s > patience_s else None


def silence_reason(quiet_s: float, patience_s: float) -> str | None:
    return f"the engine has said nothing for {quiet_s:.1f} s" if quiet_s > patience_s else None
