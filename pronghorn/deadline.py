"""One time budget per request, made at the edge and carried end to end.

Processes do not share a clock, so what crosses the wire is the budget left, in seconds; the receiver anchors it anew.
"""

from dataclasses import dataclass

from pronghorn.errors import DeadlineExceeded


@dataclass(frozen=True)
class Deadline:
    expires_at_s: float
    """On the clock of the process that holds this object."""

    @classmethod
    def after(cls, now_s: float, budget_s: float) -> "Deadline":
        return cls(now_s + budget_s)

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.expires_at_s - now_s)

    def passed(self, now_s: float) -> bool:
        return now_s >= self.expires_at_s

    def require(self, now_s: float, doing: str) -> float:
        """Seconds left; raises DeadlineExceeded, naming what was being done, where none are."""
        left_s = self.remaining_s(now_s)
        if left_s <= 0.0:
            raise DeadlineExceeded(f"the request's deadline passed while {doing}")
        return left_s
