"""Whether a node that keeps failing is given work: a circuit breaker for each life of a node.

Pure: what the node did comes in with the time; it knows neither requests nor errors, and `counts_as_failure` says which
errors are a node's fault. Invariants: only failures in a row open it; while it is half open one request at a time tries
the node; it never stays open by itself, with or without traffic.

    CLOSED --failures in a row--> OPEN --time--> HALF_OPEN --success--> CLOSED
                                    ^--failure----|
"""

from dataclasses import dataclass
from enum import Enum

from pronghorn.errors import (
    Cancelled,
    DeadlineExceeded,
    InsufficientBlocks,
    NoPrefill,
    Overloaded,
    PoisonRequest,
    PronghornError,
    ServiceError,
)

NOT_ITS_FAULT = (Overloaded, InsufficientBlocks, NoPrefill, DeadlineExceeded, Cancelled, PoisonRequest)


def counts_as_failure(error: PronghornError) -> bool:
    """4xx is the client's fault, a full node's refusal is load, and a deadline may be anybody's."""
    return isinstance(error, ServiceError) and not isinstance(error, NOT_ITS_FAULT)


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class BreakerEvent(Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The last failure that is let pass in a row, or one of a trial."""
    COOLED = "cooled"


_C, _O, _H = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_C, BreakerEvent.SUCCEEDED): _C,
    (_C, BreakerEvent.FAILED): _O,
    (_C, BreakerEvent.COOLED): _C,
    # What began before it opened may still succeed or fail; only a trial closes it.
    (_O, BreakerEvent.SUCCEEDED): _O,
    (_O, BreakerEvent.FAILED): _O,
    (_O, BreakerEvent.COOLED): _H,
    (_H, BreakerEvent.SUCCEEDED): _C,
    (_H, BreakerEvent.FAILED): _O,
    (_H, BreakerEvent.COOLED): _H,
}


@dataclass(frozen=True)
class BreakerPolicy:
    failures: int = 3
    """In a row, that open it."""
    open_min_s: float = 1.0
    open_max_s: float = 8.0
    """It stays open twice as long after each trial that failed, up to this."""


class Breaker:
    def __init__(self, policy: BreakerPolicy) -> None:
        self.state = _C
        self._policy = policy
        self._failures = 0
        self._open_s = policy.open_min_s
        self._until_s = 0.0
        self._trying = False

    def refusal(self, now_s: float) -> str | None:
        """Why the node is given no work now; None where it may be."""
        self._cool(now_s)
        if self.state is _O:
            return f"breaker open after {self._failures} failures, for {self._until_s - now_s:.1f} s more"
        return "breaker half open, one request tries it" if self._trying else None

    def asked(self, now_s: float) -> None:
        """A request goes there, or may."""
        self._cool(now_s)
        self._trying = self.state is _H

    def let_go(self) -> None:
        """A request that might have tried the node has not, or has ended without saying how the node did."""
        self._trying = False

    def succeeded(self, now_s: float) -> None:
        self._cool(now_s)
        self._apply(BreakerEvent.SUCCEEDED)
        self._trying = False
        if self.state is _C:
            self._failures, self._open_s = 0, self._policy.open_min_s

    def failed(self, now_s: float) -> None:
        self._cool(now_s)
        before = self.state
        self._failures += 1
        if before is _C and self._failures < self._policy.failures:
            return
        self._apply(BreakerEvent.FAILED)
        self._trying = False
        if before is not _O:
            self._until_s = now_s + self._open_s
            self._open_s = min(2 * self._open_s, self._policy.open_max_s)

    def _cool(self, now_s: float) -> None:
        if self.state is _O and now_s >= self._until_s:
            self._apply(BreakerEvent.COOLED)

    def _apply(self, event: BreakerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]
