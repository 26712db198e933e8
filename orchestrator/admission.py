"""Who may run, who waits, who is sent away: slots and one FIFO queue, both bounded.

Pure. It knows request ids and counts; it knows nothing of nodes, time or why a request leaves.

Invariants: at most `max_in_flight` hold a slot and at most `max_queue` wait; nobody waits while a slot is free; the
longest waiting is next; an id is here once or not at all.
"""

from pronghorn.ids import RequestID
from pronghorn.ledger import Held, Kind


class Admission:
    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._running: set[RequestID] = set()
        self._waiting: dict[RequestID, None] = {}  # a dict for its order and its O(1) removal

    def can_admit(self) -> str | None:
        """Why one more request cannot enter, or None where it can."""
        if len(self._running) < self._max_in_flight or len(self._waiting) < self._max_queue:
            return None
        return f"{len(self._running)} requests are running and {len(self._waiting)} are waiting, which are the bounds"

    def enter(self, request_id: RequestID) -> bool:
        """Take the request in: True where it has a slot now, False where it waits. Ask `can_admit` first."""
        assert self.can_admit() is None, "asked to take a request in without room for it"
        if request_id in self._running or request_id in self._waiting:
            raise ValueError(f"request {request_id} was admitted already")
        if len(self._running) < self._max_in_flight:
            self._running.add(request_id)
            return True
        self._waiting[request_id] = None
        return False

    def leave(self, request_id: RequestID) -> RequestID | None:
        """Give back the slot or the place in the queue; returns the waiting request that has the slot now, if any."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            return None
        self._running.remove(request_id)
        if not self._waiting:
            return None
        heir = next(iter(self._waiting))
        del self._waiting[heir]
        self._running.add(heir)
        return heir

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def held(self) -> list[Held]:
        slots = [Held(Kind.SLOT, name) for name in sorted(str(request_id) for request_id in self._running)]
        return slots + [Held(Kind.QUEUE_PLACE, str(request_id)) for request_id in self._waiting]

    def check(self) -> None:
        assert len(self._running) <= self._max_in_flight
        assert len(self._waiting) <= self._max_queue
        assert not self._waiting or len(self._running) == self._max_in_flight
        assert not self._running & self._waiting.keys()
