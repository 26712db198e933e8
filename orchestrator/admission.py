"""Who may run, who waits, who is sent away: slots for those that run, places for those without a first token, a queue.

Pure: it knows request ids, what was asked for them, and the time it is told. It knows nothing of nodes, nor why a
request leaves. Each orchestrator has one of its own, and bounds only what goes through it.

Who is next: the most urgent priority (the lowest number); in it the key that has had least (`fair_share.py`); of its
requests the oldest. An urgent request waits for those that are as urgent or more: the others' places without a first
token do not count against it, and the last slots of `reserved` are not given to priority 0 and beyond.

Who is refused: at once, whoever would wait longer than its deadline or `max_queue_wait_s` leave room for, by the rate
at which the queue drains, and whoever finds the queue full of those that have as much right to it; later, with the same
words, whoever is displaced by one that has more right, or still waits when it is too late to begin. Nobody is refused
for a prediction where there is no wait: a wrong measure cannot shut the door for good.

Invariants: at most `max_in_flight` hold a slot, at most `max_queue` and `max_queue_bytes` wait; nobody waits who may
run; in a priority nobody is passed over for ever; whoever enters is granted once, or dismissed once, or leaves by
itself; an id is here once or not at all.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from orchestrator.drain_rate import DrainRate
from orchestrator.fair_share import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairShare
from pronghorn.ids import RequestID
from pronghorn.ledger import Held, Kind

RESERVED_SHARE = 16
"""One slot in so many is kept for requests more urgent than 0."""
MAX_RETRY_AFTER_S = 60.0


class Why(Enum):
    """Why a request is refused: words for counters."""

    QUEUE_FULL = "queue_full"
    QUEUE_BYTES = "queue_bytes"
    WAIT = "wait_too_long"
    DEADLINE = "deadline_out_of_reach"
    DISPLACED = "displaced"


@dataclass(frozen=True)
class Refusal:
    why: Why
    message: str
    retry_after_s: float | None
    """When there may be room for it, as far as the queue's measured rate tells; None: nothing is measured yet."""


@dataclass(frozen=True)
class Limits:
    max_in_flight: int
    max_queue: int
    max_queue_bytes: int = 1 << 60
    max_queue_wait_s: float = math.inf
    max_idle_keys: int = 10_000

    @property
    def reserved(self) -> int:
        return self.max_in_flight // RESERVED_SHARE


@dataclass(frozen=True)
class Ticket:
    request_id: RequestID
    priority: int = 0
    """The lower, the sooner."""
    share: str = ""
    """The key whose fair share it is counted to."""
    prompt_tokens: int = 1
    size_bytes: int = 0
    """What it keeps in memory while it waits."""
    start_by_s: float = math.inf
    """When it must have begun to end before its deadline."""
    late_by: Why = Why.DEADLINE
    """What makes it too late then: while it waits, the bound on that may be nearer."""


@dataclass
class Turn:
    """What follows from what happened: who runs from here on, and who waits no more."""

    granted: list[RequestID] = field(default_factory=list)
    dismissed: list[tuple[RequestID, Refusal]] = field(default_factory=list)
    """Each is to `leave` all the same."""


class Admission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: dict[RequestID, Ticket] = {}
        self._unstarted: dict[RequestID, Ticket] = {}
        """Those that run and have no first token yet."""
        self._unstarted_by: Counter[int] = Counter()
        self._waiting: dict[int, dict[str, dict[RequestID, Ticket]]] = {}
        """By priority, by key, in order of arrival."""
        self._queued: dict[RequestID, Ticket] = {}
        """All that wait, in order of arrival."""
        self._dismissed: set[RequestID] = set()
        self._bytes = 0
        self._shares = FairShare(limits.max_idle_keys)
        self._rate = DrainRate()
        self._start_room: int | None = None

    # --- what happens -------------------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket, now_s: float) -> Turn | Refusal:
        """Take the request in, to run or to wait. Raises ValueError for one that is here already."""
        if ticket.request_id in self:
            raise ValueError(f"request {ticket.request_id} was admitted already")
        if not self._blocked(ticket.priority) and not any(p <= ticket.priority for p in self._waiting):
            self._shares.holds(ticket.share, waits=False)
            self._run(ticket)
            return Turn([ticket.request_id])
        victims = self._make_place(ticket, now_s)
        if isinstance(victims, Refusal):
            return victims
        for victim in victims:
            self._dequeue(victim)
            self._shares.leaves(victim.share, waited=True)
        turn = Turn(dismissed=[(v.request_id, self._dismiss(v, Why.DISPLACED, now_s)) for v in victims])
        self._rate.waiting(now_s)
        self._shares.holds(ticket.share, waits=True)
        if (patience_s := now_s + self._limits.max_queue_wait_s) < ticket.start_by_s:
            ticket = replace(ticket, start_by_s=patience_s, late_by=Why.WAIT)
        self._waiting.setdefault(ticket.priority, {}).setdefault(ticket.share, {})[ticket.request_id] = ticket
        self._queued[ticket.request_id] = ticket
        self._bytes += ticket.size_bytes
        return turn

    def started(self, request_id: RequestID, now_s: float) -> Turn:
        """Its first token came."""
        self._start(request_id)
        return self._let_in(now_s)

    def delivered(self, request_id: RequestID, tokens: int) -> None:
        if (ticket := self._running.get(request_id)) is not None:
            self._shares.spend(ticket.share, OUTPUT_WEIGHT * tokens)

    def leave(self, request_id: RequestID, now_s: float) -> Turn:
        """It is over. KeyError for one that is not here."""
        if request_id in self._dismissed:
            self._dismissed.remove(request_id)
            return Turn()
        if (ticket := self._queued.get(request_id)) is not None:
            self._dequeue(ticket)
            self._shares.leaves(ticket.share, waited=True)
            return Turn()
        self._start(request_id)
        self._shares.leaves(self._running.pop(request_id).share, waited=False)
        return self._let_in(now_s)

    def make_room(self, start_room: int | None, now_s: float) -> Turn:
        """From now on so many may be without a first token; None: any number."""
        self._start_room = start_room
        return self._let_in(now_s)

    def overdue(self, request_id: RequestID, now_s: float) -> Turn:
        """It is too late for it to begin, where it still waits."""
        ticket = self._queued.get(request_id)
        return Turn() if ticket is None else Turn(dismissed=[self._too_late(ticket, now_s)])

    # --- who is next --------------------------------------------------------------------------------------------------

    def _let_in(self, now_s: float) -> Turn:
        turn = Turn()
        while self._waiting:
            priority = min(self._waiting)
            if self._blocked(priority):
                break
            ticket = self._next(priority)
            if ticket.start_by_s < now_s:
                turn.dismissed.append(self._too_late(ticket, now_s))
                continue
            self._rate.left(now_s)
            self._dequeue(ticket)
            self._shares.let_in(ticket.share)
            self._run(ticket)
            turn.granted.append(ticket.request_id)
        return turn

    def _blocked(self, priority: int) -> bool:
        limits = self._limits
        if len(self._running) >= limits.max_in_flight - (limits.reserved if priority >= 0 else 0):
            return True
        if self._start_room is None:
            return False
        return sum(n for p, n in self._unstarted_by.items() if p <= priority) >= self._start_room

    def _next(self, priority: int) -> Ticket:
        keys = self._waiting[priority]
        share = min(keys, key=self._shares.spent)  # the first of equal ones, which has waited as a key for longest
        return next(iter(keys[share].values()))

    def _run(self, ticket: Ticket) -> None:
        self._running[ticket.request_id] = self._unstarted[ticket.request_id] = ticket
        self._unstarted_by[ticket.priority] += 1
        self._shares.spend(ticket.share, PROMPT_WEIGHT * ticket.prompt_tokens)

    def _start(self, request_id: RequestID) -> None:
        if (ticket := self._unstarted.pop(request_id, None)) is not None:
            self._unstarted_by[ticket.priority] -= 1
            if not self._unstarted_by[ticket.priority]:
                del self._unstarted_by[ticket.priority]

    def _dequeue(self, ticket: Ticket) -> None:
        keys = self._waiting[ticket.priority]
        del keys[ticket.share][ticket.request_id]
        if not keys[ticket.share]:
            del keys[ticket.share]
        if not keys:
            del self._waiting[ticket.priority]
        del self._queued[ticket.request_id]
        self._bytes -= ticket.size_bytes
        if not self._queued:
            self._rate.idle()

    # --- who is refused -----------------------------------------------------------------------------------------------

    def _make_place(self, ticket: Ticket, now_s: float) -> list[Ticket] | Refusal:
        """Who has to go for it to wait here; or why it may not."""
        limits, ahead = self._limits, self._ahead(ticket)
        wait_s = self._wait_s(ahead, now_s)
        if wait_s is not None and now_s + wait_s > ticket.start_by_s:
            over_s = now_s + wait_s - ticket.start_by_s
            text = f"it would wait {wait_s:.1f} s for its turn and could not end before its deadline"
            return Refusal(Why.DEADLINE, text, _bounded(over_s))
        if wait_s is not None and wait_s > limits.max_queue_wait_s:
            text = f"it would wait {wait_s:.1f} s for its turn, over the bound of {limits.max_queue_wait_s:g} s"
            return Refusal(Why.WAIT, text, _bounded(wait_s - limits.max_queue_wait_s))
        victims: list[Ticket] = []
        retry_after_s = _bounded(self._wait_s(max(1, ahead), now_s))
        freed_bytes = 0
        candidates = self._with_less_right(ticket)
        while len(self._queued) - len(victims) >= limits.max_queue:
            if (victim := next(candidates, None)) is None:
                text = f"{len(self._running)} requests are running and {len(self._queued)} are waiting"
                return Refusal(Why.QUEUE_FULL, f"{text}, which are the bounds", retry_after_s)
            victims.append(victim)
            freed_bytes += victim.size_bytes
        while self._bytes - freed_bytes + ticket.size_bytes > limits.max_queue_bytes:
            if (victim := next(candidates, None)) is None:
                text = f"waiting requests hold {self._bytes} bytes of {limits.max_queue_bytes}"
                return Refusal(Why.QUEUE_BYTES, f"{text}, and this one has {ticket.size_bytes}", retry_after_s)
            victims.append(victim)
            freed_bytes += victim.size_bytes
        return victims

    def _with_less_right(self, ticket: Ticket) -> Iterator[Ticket]:
        """Waiting requests that go before `ticket` is refused: the least urgent first, of the key that has most of them
        waiting its newest; and among equals those of a key that has more of them than the newcomer's would have."""
        for priority in sorted(self._waiting, reverse=True):
            if priority < ticket.priority:
                return
            keys = {share: list(queue.values()) for share, queue in self._waiting[priority].items()}
            own = len(keys.get(ticket.share, ())) + 1 if priority == ticket.priority else 0
            while keys:
                largest = max(keys, key=lambda share: len(keys[share]))
                if priority == ticket.priority and (len(keys[largest]) <= own or largest == ticket.share):
                    return
                yield keys[largest].pop()
                if not keys[largest]:
                    del keys[largest]

    def _ahead(self, ticket: Ticket) -> int:
        """How many are let in before a newcomer, if nobody comes after it."""
        more_urgent = sum(
            len(queue) for p, keys in self._waiting.items() if p < ticket.priority for queue in keys.values()
        )
        keys = self._waiting.get(ticket.priority, {})
        own = len(keys.get(ticket.share, ()))
        return more_urgent + own + sum(min(len(q), own + 1) for share, q in keys.items() if share != ticket.share)

    def _wait_s(self, ahead: int, now_s: float) -> float | None:
        rate = self._rate.per_s(now_s)
        return None if rate is None else ahead / max(rate, 1e-6)

    def _too_late(self, ticket: Ticket, now_s: float) -> tuple[RequestID, Refusal]:
        refusal = self._dismiss(ticket, ticket.late_by, now_s)
        self._dequeue(ticket)
        self._shares.leaves(ticket.share, waited=True)
        return ticket.request_id, refusal

    def _dismiss(self, ticket: Ticket, why: Why, now_s: float) -> Refusal:
        self._dismissed.add(ticket.request_id)
        retry_after_s = _bounded(self._wait_s(max(1, len(self._queued)), now_s))
        if why is Why.DISPLACED:
            return Refusal(why, "the queue is full of requests that have more right to it", retry_after_s)
        if why is Why.WAIT:
            return Refusal(why, f"its turn did not come within {self._limits.max_queue_wait_s:g} s", retry_after_s)
        return Refusal(why, "its turn did not come while it could still end before its deadline", retry_after_s)

    # --- what is ------------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: RequestID) -> bool:
        return request_id in self._running or request_id in self._queued or request_id in self._dismissed

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unstarted(self) -> int:
        return len(self._unstarted)

    @property
    def waiting(self) -> int:
        return len(self._queued)

    @property
    def dismissed(self) -> int:
        return len(self._dismissed)

    def gauges(self, now_s: float) -> dict[str, int]:
        rate = self._rate.per_s(now_s)
        return {
            "admission_waiting": len(self._queued),
            "admission_waiting_bytes": self._bytes,
            "admission_running": len(self._running),
            "admission_unstarted": len(self._unstarted),
            "admission_keys": len(self._shares),
            "admission_drained_per_minute": 0 if rate is None else round(60 * rate),
        }

    def held(self) -> list[Held]:
        slots = [Held(Kind.SLOT, name) for name in sorted(str(request_id) for request_id in self._running)]
        return slots + [Held(Kind.QUEUE_PLACE, str(request_id)) for request_id in self._queued]

    def check(self) -> None:
        limits = self._limits
        assert len(self._running) <= limits.max_in_flight
        assert len(self._queued) <= limits.max_queue and 0 <= self._bytes <= limits.max_queue_bytes
        assert self._bytes == sum(ticket.size_bytes for ticket in self._queued.values())
        in_order = [t for keys in self._waiting.values() for queue in keys.values() for t in queue.values()]
        assert {t.request_id for t in in_order} == self._queued.keys() and len(in_order) == len(self._queued)
        assert all(queue for keys in self._waiting.values() for queue in keys.values()) and all(self._waiting.values())
        assert not self._waiting or self._blocked(min(self._waiting))
        assert not self._running.keys() & self._queued.keys() and not self._dismissed & self._queued.keys()
        assert self._unstarted.keys() <= self._running.keys()
        assert self._unstarted_by == Counter(ticket.priority for ticket in self._unstarted.values())
        self._shares.check()


def _bounded(after_s: float | None) -> float | None:
    return None if after_s is None else min(MAX_RETRY_AFTER_S, after_s)
