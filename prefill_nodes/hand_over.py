"""One hand-over on its prefill node: what the engine has reported, in the order in which it should leave.

Pure: knows neither engine nor stream. The first token leaves before anything else that waits, then blocks in the
order in which they were finished, and the commit when all that was wanted has left.

    COMPUTING --first token--> SENDING --all blocks taken--> COMMITTED
        +---------failed-----------+--> FAILED

Invariants: each wanted position leaves once; nothing leaves after a failure or the commit.
"""

import enum
from collections import deque
from dataclasses import dataclass

from pipelines.runtime.messages import ChunkReady
from pipelines.types.handover import FirstToken
from pronghorn.errors import ErrorRecord


class HandOverState(enum.Enum):
    COMPUTING = "computing"
    SENDING = "sending"
    COMMITTED = "committed"
    FAILED = "failed"


TRANSITIONS: dict[HandOverState, frozenset[HandOverState]] = {
    HandOverState.COMPUTING: frozenset({HandOverState.SENDING, HandOverState.FAILED}),
    HandOverState.SENDING: frozenset({HandOverState.COMMITTED, HandOverState.FAILED}),
    HandOverState.COMMITTED: frozenset(),
    HandOverState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class Blocks:
    """Pairs of position and block id, to be read and sent in this order."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True)
class Commit:
    pass


Step = FirstToken | Blocks | Commit | ErrorRecord


class HandOver:
    def __init__(self, wanted: list[int]) -> None:
        self.state = HandOverState.COMPUTING
        self._outstanding = set(wanted)
        self._ready: deque[tuple[int, int]] = deque()
        self._token: FirstToken | None = None
        self._error: ErrorRecord | None = None

    @property
    def over(self) -> bool:
        return self.state in (HandOverState.COMMITTED, HandOverState.FAILED)

    def on_chunk(self, event: ChunkReady) -> None:
        if not self.over:
            self._ready.extend(zip(event.positions, event.block_ids, strict=True))

    def on_first_token(self, token: FirstToken) -> None:
        if not self.over:
            self._move(HandOverState.SENDING)
            self._token = token

    def fail(self, error: ErrorRecord) -> None:
        """The first failure is kept."""
        if not self.over:
            self._move(HandOverState.FAILED)
            self._error = error

    def take(self, max_blocks: int) -> Step | None:
        """What is to leave now, at most `max_blocks` at once; None where there is nothing yet, or nothing more."""
        if self._error is not None:
            error, self._error = self._error, None
            return error
        if self.over:
            return None
        if self._token is not None:
            token, self._token = self._token, None
            return token
        if self._ready:
            pairs = [self._ready.popleft() for _ in range(min(max_blocks, len(self._ready)))]
            positions = {position for position, _ in pairs}
            assert positions <= self._outstanding, f"blocks {positions - self._outstanding} are not outstanding"
            self._outstanding -= positions
            return Blocks(pairs)
        if self.state is HandOverState.SENDING and not self._outstanding:
            self._move(HandOverState.COMMITTED)
            return Commit()
        return None

    def _move(self, state: HandOverState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
