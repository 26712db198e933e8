"""One orchestrator's session as a node holds it: what there is still to say, gathered until the writer takes it.

Knows deltas, failures, beats and block events. Must not know sockets or engines.
Invariants: everything said between two takes leaves as one `Outputs` frame, in order; one writer takes. The amount
that may wait is bounded: an orchestrator that reads so slowly that more waits loses the session, and with it its
attempts, so that one slow reader never holds memory or blocks of others.
"""

import asyncio
from collections.abc import Mapping, Sequence

from kvcache.handshake import Identity
from pipelines.node.block_feed import NONE_KEPT, BlockFeed, Event
from pipelines.types.frames import Delta, Failure, Outputs, Pulled
from pronghorn.errors import ErrorRecord, PronghornError
from pronghorn.ids import Fence

MAX_WAITING_OUTPUTS = 65_536
"""Deltas, failures and pulls; 32 sequences at 50 tokens per second fill it in forty seconds without one read."""


class Session:
    def __init__(self, peer: Identity, max_waiting: int = MAX_WAITING_OUTPUTS) -> None:
        self.peer = peer
        self.end_reason: str | None = None
        """Why the session is over; None while it is not."""
        self._max_waiting = max_waiting
        self._deltas: list[Delta] = []
        self._failures: list[Failure] = []
        self._pulls: list[Pulled] = []
        self._beat_asked = False
        self.blocks = BlockFeed()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()

    def say(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._added()

    def fail(self, fence: Fence, error: PronghornError | ErrorRecord) -> None:
        record = error if isinstance(error, ErrorRecord) else error.record()
        self._failures.append(Failure(fence, record))
        self._added()

    def pulled(self, pulled: Pulled) -> None:
        self._pulls.append(pulled)
        self._added()

    def _added(self) -> None:
        waiting = self.unsaid
        if waiting > self._max_waiting:
            self.end(f"{self.peer.name} reads too slowly: {waiting} outputs wait (bound {self._max_waiting})")
        self._wake.set()

    def cache_changed(self, events: Sequence[Event], kept: Mapping[str, Sequence[Event]] = NONE_KEPT) -> None:
        self.blocks.add(events, kept)
        self._wake.set()

    def resend_blocks(self) -> None:
        self.blocks.resend()
        self._wake.set()

    def ask_beat(self) -> None:
        """Have a heartbeat sent now: what it would say has changed."""
        self._beat_asked = True
        self._wake.set()

    @property
    def unsaid(self) -> int:
        """Deltas, failures and pulls that wait for the writer."""
        return len(self._deltas) + len(self._failures) + len(self._pulls)

    def end(self, reason: str) -> None:
        """The session is over; what was said before may still leave. The first reason is kept."""
        self.end_reason = self.end_reason or reason
        self._over.set()
        self._wake.set()

    async def over(self) -> None:
        await self._over.wait()

    def take(self) -> Outputs | None:
        """Everything said since the last take, as one frame."""
        if not self._deltas and not self._failures and not self._pulls:
            return None
        outputs = Outputs(self._deltas, self._failures, self._pulls)
        self._deltas, self._failures, self._pulls = [], [], []
        return outputs

    def take_beat(self) -> bool:
        asked, self._beat_asked = self._beat_asked, False
        return asked

    async def wait(self, timeout_s: float) -> None:
        """Return when there is something to do, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()
