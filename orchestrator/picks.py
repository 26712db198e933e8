"""How the latest nodes that were picked for requests have done: whether so many fail that somebody should look.

Pure: the outcome of each pick comes in with the time. Who was picked to decode did well where a first token came, who
was picked to prefill where the hand-over did; what is no node's fault (`breaker.counts_as_failure`) is no outcome.
Breakers and retries hide single failures from clients; many at once say that what is known of the nodes is not true.
"""

from collections import deque

KEPT = 100
WINDOW_S = 60.0
LEAST = 10
"""Outcomes below which nothing is said."""
DEGRADED_SHARE = 0.2


class Picks:
    def __init__(self) -> None:
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=KEPT)

    def note(self, well: bool, now_s: float) -> None:
        self._outcomes.append((now_s, well))

    def degraded(self, now_s: float) -> str | None:
        """What is wrong with the picks of the last `WINDOW_S`, `KEPT` at most; None: nothing much."""
        recent = [well for at_s, well in self._outcomes if now_s - at_s <= WINDOW_S]
        failed = recent.count(False)
        if len(recent) < LEAST or failed <= DEGRADED_SHARE * len(recent):
            return None
        return f"{failed} of the last {len(recent)} nodes that were picked failed, within {WINDOW_S:g} s"
