"""Blocks for other nodes, from the holder's side: each fetch is a lease in the engine, streamed as far as it goes.

Knows who may ask, and for how long. Invariants: a block is read only while its lease is open and before its end, by
every path; a lease ends with its stream, and its stream after `LEASE_S` at the latest, whether anybody reads or not
(the gRPC handler cuts it off); what is asked for is looked up by whole hashes and nothing else.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvcache import fetch, transfer
from kvcache.fetch import Declined, FetchRequest, Opened, Stock
from kvcache.handshake import Identity, check_peer
from pipelines.node.engine_holds import EngineHolds, Lease
from pipelines.node.engine_link import EngineLink
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import HandshakeRefused, Overloaded, PronghornError, TransferFailed

log = logging.getLogger(__name__)

LEASE_S: Final = 30.0
"""The longest that a fetch may hold blocks."""
MAX_LEASES: Final = 64
PROGRESS_PERIOD_S = 0.3
QUIET_ENGINE_S = 5.0
"""An engine that has reported nothing for this long is no longer vouched for."""


class FetchService:
    def __init__(
        self,
        identity: Callable[[], Identity],
        require_serving: Callable[[], None],
        holds: EngineHolds,
        link: EngineLink,
        clock: Clock,
        counters: Counters,
    ) -> None:
        """`require_serving` raises where the node takes no work."""
        self._identity = identity
        self._require_serving = require_serving
        self._holds = holds
        self._link = link
        self._clock = clock
        self._counters = counters
        self.open = 0

    async def frames(
        self, data: bytes, carriage: transfer.Carriage = transfer.IN_FRAMES
    ) -> AsyncGenerator[bytes, None]:
        """The frames of the fetch that `data` asks for. Closing the generator, at any point, ends its lease."""
        self.open += 1
        try:
            request = self._accept(data)
            yield _say(Opened(self._identity().to_hello().SerializeToString()))
            async with self._holds.lease(request.hashes) as lease:
                expires_at_s = self._clock.now_s() + min(LEASE_S, request.budget_s)
                sent: dict[int, bytes] = {}
                while True:
                    yield _say(Stock(len(lease.blocks), lease.coming))
                    while len(sent) < len(lease.blocks):
                        for frame in self._next_blocks(lease, sent, expires_at_s, carriage):
                            yield frame
                    if not await self._more(lease, request, expires_at_s):
                        break
                yield transfer.encode_commit(sent)
                self._counters.count("fetch_served")
        except PronghornError as error:
            self._counters.count("fetch_refused", error.code)
            log.info("%s: a fetch was refused: %s", self._identity().name, error.message)
            yield _say(Declined(error.record()))
        finally:
            self.open -= 1

    def _accept(self, data: bytes) -> FetchRequest:
        request = FetchRequest.from_bytes(data)
        ours = self._identity()
        if request.holder_incarnation != ours.incarnation:
            raise HandshakeRefused(
                f"incarnation: the fetch is for {request.holder_incarnation}, this is {ours.incarnation}",
                param="incarnation",
            )
        check_peer(ours, request.asker)
        self._require_serving()
        if self.open > MAX_LEASES:
            raise Overloaded(f"{self.open} fetches are open on {ours.name} (bound {MAX_LEASES})")
        return request

    def _next_blocks(
        self, lease: Lease, sent: dict[int, bytes], expires_at_s: float, carriage: transfer.Carriage
    ) -> list[bytes]:
        """Frames of the next blocks. Read at once: nothing of them waits while the lease goes on."""
        if self._clock.now_s() >= expires_at_s:
            raise TransferFailed("the time of this fetch is up", code=fetch.EXPIRED)
        memory = self._link.memory
        first = len(sent)
        last = min(len(lease.blocks), first + carriage.blocks_per_frame(memory.block_bytes))
        pairs = ((position, memory.block(lease.blocks[position])) for position in range(first, last))
        self._counters.count("blocks_lent", n=last - first)
        return list(carriage.encode(pairs, sent))

    async def _more(self, lease: Lease, request: FetchRequest, expires_at_s: float) -> bool:
        """Whether the stream goes on: there is more, or it is being computed, or the asker has patience for it."""
        held, now_s = len(lease.blocks), self._clock.now_s()
        if held == len(request.hashes) or self._link.quiet_s > QUIET_ENGINE_S:
            return False
        waits_s = PROGRESS_PERIOD_S
        if lease.coming == 0:
            begun_s = expires_at_s - min(LEASE_S, request.budget_s)
            waits_s = min(PROGRESS_PERIOD_S, begun_s + request.patience_s - now_s) if held == 0 else 0.0
        if waits_s <= 0.0 or now_s >= expires_at_s:
            return False
        await lease.wait(waits_s)
        return True


def _say(message: fetch.FetchMessage) -> bytes:
    return transfer.encode_message(fetch.encode(message))
