"""How fast a queue drains, measured while somebody waits in it.

Pure; time comes in. Only periods in which the queue was never empty count: an idle queue drains as fast as it fills,
which says nothing. While nothing moves the rate falls by itself: of a window in which `n` have left so far, it is known
that no more than `n + 1` would have.
"""

WINDOW_S = 1.0
WEIGHT = 0.5
"""Of each new window."""


class DrainRate:
    def __init__(self) -> None:
        self._per_s: float | None = None
        self._since_s: float | None = None
        self._left = 0

    def waiting(self, now_s: float) -> None:
        """Somebody waits; says nothing where somebody did already."""
        if self._since_s is None:
            self._since_s, self._left = now_s, 0

    def idle(self) -> None:
        """Nobody waits any more."""
        self._since_s = None

    def left(self, now_s: float) -> None:
        """One of those that waited was let in."""
        self._left += 1
        if self._since_s is None or (elapsed_s := now_s - self._since_s) < WINDOW_S:
            return
        measure = self._left / elapsed_s
        self._per_s = measure if self._per_s is None else self._per_s + WEIGHT * (measure - self._per_s)
        self._since_s, self._left = now_s, 0

    def per_s(self, now_s: float) -> float | None:
        """None: not measured yet."""
        if self._since_s is None or (elapsed_s := now_s - self._since_s) < WINDOW_S:
            return self._per_s
        most = (self._left + 1) / elapsed_s
        return most if self._per_s is None else min(self._per_s, most)
