"""A load on many nodes, a phase at a time: the real router and the real admission over a model of each node's time.

Knows no token of a request: a prompt is computed, handed over and decoded in one event each. A node computes one prompt
after another, less what its cache holds of it, the more urgent before others, which are cut at the next chunk for them.
A sequence has its slot on a decode node before its prompt is computed; up to `max_batch` run there, a step being longer
the more there are, and a prompt that the node computes itself holds them all up. What caches gain and lose goes to the
router's own holdings as block events. Where there are many nodes, the router is handed the least loaded ones of each
role, which are kept in order here, and those that hold most of the prompt: a choice costs the same whatever their
number.
"""

import heapq
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from cluster.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest
from orchestrator.admission import Admission, Refusal, Ticket, Turn
from orchestrator.holdings import Holdings
from orchestrator.nodes import NodeView
from orchestrator.routing.break_even import Speeds
from orchestrator.routing.facts import RequestFacts
from orchestrator.routing.router import Router
from pipelines.types.frames import BlockEvents, BlocksCleared, BlocksRemoved, BlocksStored
from pronghorn.ids import Incarnation, NodeName, RequestID

MODEL = "model"
TTFT_GOAL_S = 2.0
INTER_TOKEN_GOAL_S = 0.05
"""A request that keeps both counts as good."""
SHORTLIST = 4
"""Nodes of each role that the router chooses from, beside as many holders; where nodes are few, all."""
TICK_S = 1.0


@dataclass(frozen=True)
class NodeTiming:
    """Measures of one node."""

    prefill_tokens_per_s: float = 8000.0
    decode_step_s: float = 0.02
    decode_sequence_s: float = 0.0004
    """What each further sequence adds to a step."""
    max_batch: int = 64
    link_bytes_per_s: float = 1.25e9
    kv_bytes_per_token: int = 65_536
    hop_s: float = 0.0005
    cache_blocks: int = 2000
    """Of `TRACE_BLOCK_TOKENS` tokens each."""
    chunk_tokens: int = 512
    """Of a prompt that a decode node computes, in each step."""
    max_local_prefill_tokens: int = 65_536
    """That may wait on a decode node to be computed there."""

    def speeds(self) -> Speeds:
        """As a router would have learned them."""
        return Speeds(self.prefill_tokens_per_s, self.link_bytes_per_s, self.decode_step_s, self.decode_sequence_s)

    def step_s(self, running: int) -> float:
        return self.decode_step_s + self.decode_sequence_s * running


class LoadNode:
    """One node as the model has it."""

    def __init__(self, name: str, role: Literal["prefill", "decode"]) -> None:
        self.name = name
        self.role = role
        self.load = 0
        self.running = 0
        self.slots = 0
        """Taken by those that run, and those whose prompt is computed for this node."""
        self.queue: list[tuple[int, int, _Flight]] = []
        """Who waits for a slot: the most urgent first, then as they came."""
        self.prompts: list[tuple[int, int, _Flight]] = []
        """To be computed here, likewise."""
        self.computing: _Flight | None = None
        self.prompt_tokens = 0
        """Of those, of the one that is being computed, and of those that wait for a slot to be computed here."""
        self.cache: OrderedDict[int, None] = OrderedDict()
        self._view: NodeView | None = None
        self.stalled_s = 0.0
        """For how long, since the start, its sequences stood still while it computed prompts."""
        self.life = Incarnation(name)
        self._told = 0

    def view(self, now_s: float, timing: NodeTiming) -> NodeView:
        """As the router sees it; made anew only where that has changed."""
        queued_tokens = self.prompt_tokens
        seen = self._view
        if seen is not None and seen.in_flight == self.load and seen.queued_tokens == queued_tokens:
            return seen
        local = self.role == "decode"
        self._view = NodeView(
            name=NodeName(self.name),
            role=self.role,
            model=MODEL,
            address=self.name,
            incarnation=self.life,
            unusable=None,
            in_flight=self.load,
            waiting=len(self.queue),
            free_blocks=0,
            queued_tokens=queued_tokens,
            local_prefill_room_tokens=max(0, timing.max_local_prefill_tokens - queued_tokens) if local else None,
        )
        return self._view

    def take(self, hash_ids: tuple[int, ...], capacity: int) -> tuple[int, BlockEvents]:
        """Leading blocks that are cached; all of them are from now on. The last ones go first, as in a pool."""
        cache = self.cache
        hits = 0
        while hits < len(hash_ids) and hash_ids[hits] in cache:
            hits += 1
        for hash_id in reversed(hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        events: list[BlocksStored | BlocksRemoved | BlocksCleared] = []
        if hits < len(hash_ids):
            parent = hash_ids[hits - 1] if hits else None
            events.append(BlocksStored(None if parent is None else key_of(parent), packed(hash_ids[hits:])))
        if len(cache) > capacity:
            evicted = [cache.popitem(last=False)[0] for _ in range(len(cache) - capacity)]
            events.append(BlocksRemoved(packed(evicted)))
        if events:
            self._told += 1
        return hits, BlockEvents(self._told, events, snapshot=self._told == 1)


def packed(hash_ids: Iterable[int]) -> bytes:
    """Index keys of a trace's blocks."""
    return array("Q", map(key_of, hash_ids)).tobytes()


def key_of(hash_id: int) -> int:
    return (hash_id + 1) * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF


class ByLoad:
    """Nodes of one role, by what they have in flight. Nodes of equal load take turns."""

    def __init__(self, nodes: Iterable[LoadNode]) -> None:
        self._levels: list[dict[LoadNode, None]] = [dict.fromkeys(nodes)]
        self._least = 0

    def move(self, node: LoadNode, by: int) -> None:
        del self._levels[node.load][node]
        node.load += by
        while node.load >= len(self._levels):
            self._levels.append({})
        self._levels[node.load][node] = None
        self._least = min(self._least, node.load)

    def least(self, count: int) -> list[LoadNode]:
        while self._least < len(self._levels) - 1 and not self._levels[self._least]:
            self._least += 1
        found: list[LoadNode] = []
        for level in self._levels[self._least :]:
            for node in level:
                found.append(node)
                if len(found) == count:
                    return found
        return found


class _Event(IntEnum):
    PREFILLED = 0
    HANDED_OVER = 1
    DECODED = 2


@dataclass(slots=True, eq=False)
class _Flight:
    request: TraceRequest
    request_id: RequestID
    prefill: LoadNode | None = None
    decode: LoadNode | None = None
    uncomputed_tokens: int = 0
    prefilled_at_s: float = 0.0
    """When its prompt will have been computed, unless it is cut."""
    dispatched_at_s: float = 0.0
    began_at_s: float | None = None
    """When its prompt was first computed."""
    ttft_s: float = 0.0
    step_s: float = 0.0
    stalled_s: float = 0.0
    """How long its node had stood still when it last was seen to."""


@dataclass
class Breakdown:
    """Of each time to a first token, which is the first three and three hops, and of what follows it."""

    queued_s: list[float] = field(default_factory=list)
    """For a slot of its orchestrator."""
    waited_s: list[float] = field(default_factory=list)
    """On nodes, until the prompt was computed."""
    computed_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    """Behind the first token, until every block was there; 0 where the prompt was computed in place."""


@dataclass
class LoadResult:
    ttft_s: list[float] = field(default_factory=list)
    parts: Breakdown = field(default_factory=Breakdown)
    in_place: int = 0
    """Prompts that decode nodes computed."""
    inter_token_s: list[float] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    moved_tokens: int = 0
    """Whose blocks a decode node had to be sent."""
    end_to_end_s: list[float] = field(default_factory=list)
    good: int = 0
    """Requests within both goals."""
    shed: int = 0
    shed_by: Counter[str] = field(default_factory=Counter)
    ttft_by_priority: dict[int, list[float]] = field(default_factory=dict)
    ended: list[tuple[float, int]] = field(default_factory=list)
    """When each request ended, and how many tokens it had, its prompt's included."""
    most_in_flight: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    routing_s: float = 0.0
    """Of the wall time, in the router; sampled."""


class LoadModel:
    def __init__(
        self,
        prefill: int,
        decode: int,
        router: Router,
        holdings: Holdings,
        admission: Admission,
        timing: NodeTiming | None = None,
    ) -> None:
        """`holdings` are the router's own. Without prefill nodes, decode nodes compute the prompts."""
        self.timing = timing or NodeTiming()
        self._holdings = holdings
        self._ticked_at_s = 0.0
        self.prefill = [LoadNode(f"prefill-{i}", "prefill") for i in range(prefill)]
        self.decode = [LoadNode(f"decode-{i}", "decode") for i in range(decode)]
        self.result = LoadResult()
        self._router = router
        self._admission = admission
        self._by_load = {"prefill": ByLoad(self.prefill), "decode": ByLoad(self.decode)}
        self._named = {node.name: node for node in (*self.prefill, *self.decode)}
        self._flights: dict[RequestID, _Flight] = {}
        self._events: list[tuple[float, int, _Event, _Flight]] = []
        self._sequence = 0

    def run(self, requests: Iterable[TraceRequest]) -> LoadResult:
        began_s = time.perf_counter()
        for number, request in enumerate(requests):
            self._until(request.at_s)
            self._arrive(_Flight(request, RequestID(str(number))), request.at_s)
        self._until(float("inf"))
        self._admission.check()
        assert not self._flights and self._admission.running == self._admission.waiting == 0
        assert all(node.load == node.running == node.slots == 0 and not node.queue for node in self._named.values())
        self.result.wall_s = time.perf_counter() - began_s
        return self.result

    def _until(self, now_s: float) -> None:
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, event, flight = heapq.heappop(events)
            self.result.virtual_s = at_s
            if event is _Event.PREFILLED and at_s == flight.prefilled_at_s:
                self._prefilled(flight, at_s)
            elif event is _Event.HANDED_OVER:
                self._handed_over(flight, at_s)
            elif event is _Event.DECODED:
                self._decoded(flight, at_s)

    def _push(self, at_s: float, event: _Event, flight: _Flight) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, event, flight))

    # --- one request --------------------------------------------------------------------------------------------------

    def _arrive(self, flight: _Flight, now_s: float) -> None:
        request = flight.request
        ticket = Ticket(flight.request_id, request.priority, request.share, request.prompt_tokens)
        answer = self._admission.enter(ticket, now_s)
        if isinstance(answer, Refusal):
            self._refused(answer)
            return
        self._flights[flight.request_id] = flight
        self._follow(answer, now_s)
        self.result.most_in_flight = max(self.result.most_in_flight, len(self._flights))

    def _follow(self, turn: Turn, now_s: float) -> None:
        for request_id, refusal in turn.dismissed:
            self._refused(refusal)
            del self._flights[request_id]
            self._admission.leave(request_id, now_s)
        for request_id in turn.granted:
            self._dispatch(self._flights[request_id], now_s)

    def _refused(self, refusal: Refusal) -> None:
        self.result.shed += 1
        self.result.shed_by[refusal.why.value] += 1

    def views(self, keys: bytes, now_s: float) -> list[NodeView]:
        """The nodes that the router is handed."""
        nodes: Iterable[LoadNode] = [*self.prefill, *self.decode]
        if len(self._named) > 8 * SHORTLIST:
            least = (*self._by_load["decode"].least(SHORTLIST), *self._by_load["prefill"].least(SHORTLIST))
            holders = self._holdings.find_best(keys, SHORTLIST) if keys else []
            nodes = dict.fromkeys((*least, *(self._named[str(life)] for life in holders)))
        return [node.view(now_s, self.timing) for node in nodes]

    def _dispatch(self, flight: _Flight, now_s: float) -> None:
        request = flight.request
        flight.dispatched_at_s = now_s
        if now_s - self._ticked_at_s > TICK_S:
            self._ticked_at_s = now_s
            self._holdings.tick(now_s)
        sampled = self._sequence % 64 == 0
        began_s = time.perf_counter() if sampled else 0.0
        keys = packed(request.hash_ids)
        facts = RequestFacts(MODEL, request.prompt_tokens, keys=keys, block_tokens=TRACE_BLOCK_TOKENS)
        route = self._router.choose(facts, self.views(keys, now_s))
        if sampled:
            self.result.routing_s += 64 * (time.perf_counter() - began_s)
        decode = flight.decode = self._named[route.decode.name]
        self._by_load["decode"].move(decode, 1)
        if route.prefill:
            flight.prefill = self._named[route.prefill[0].name]
            self._by_load["prefill"].move(flight.prefill, 1)
        if flight.prefill is None:
            flight.uncomputed_tokens = request.prompt_tokens
            decode.prompt_tokens += flight.uncomputed_tokens
        if decode.slots < self.timing.max_batch:
            decode.slots += 1
            self._ask_for_prompt(flight, now_s)
        else:
            heapq.heappush(decode.queue, self._in_turn(flight))

    def _in_turn(self, flight: _Flight) -> tuple[int, int, _Flight]:
        self._sequence += 1
        return flight.request.priority, self._sequence, flight

    def _ask_for_prompt(self, flight: _Flight, now_s: float) -> None:
        node = flight.prefill or flight.decode
        assert node is not None
        reused = min(self._take(node, flight.request.hash_ids) * TRACE_BLOCK_TOKENS, flight.request.prompt_tokens - 1)
        self.result.prompt_tokens += flight.request.prompt_tokens
        self.result.reused_tokens += reused
        expected_tokens = flight.uncomputed_tokens
        flight.uncomputed_tokens = flight.request.prompt_tokens - reused
        node.prompt_tokens += flight.uncomputed_tokens - expected_tokens
        now = node.computing
        if now is not None and flight.request.priority < now.request.priority:
            self._cut(now, node, now_s)
            self._compute(flight, node, now_s + self.timing.chunk_tokens / self.timing.prefill_tokens_per_s)
        elif now is not None:
            heapq.heappush(node.prompts, self._in_turn(flight))
        else:
            self._compute(flight, node, now_s)

    def _cut(self, flight: _Flight, node: LoadNode, now_s: float) -> None:
        """Behind the chunk that it is in, a more urgent prompt is computed."""
        rate = self.timing.prefill_tokens_per_s
        left_tokens = max(0, int((flight.prefilled_at_s - now_s) * rate) - self.timing.chunk_tokens)
        node.prompt_tokens -= flight.uncomputed_tokens - left_tokens
        flight.uncomputed_tokens, flight.prefilled_at_s = left_tokens, 0.0
        heapq.heappush(node.prompts, (flight.request.priority, 0, flight))

    def _compute(self, flight: _Flight, node: LoadNode, now_s: float) -> None:
        timing = self.timing
        node.computing = flight
        if flight.began_at_s is None:
            flight.began_at_s = now_s + timing.hop_s
        computing_s = flight.uncomputed_tokens / timing.prefill_tokens_per_s
        if node is flight.decode and node.running:  # each step computes a chunk and every sequence's next token
            node.stalled_s += computing_s
            chunks = -(-flight.uncomputed_tokens // timing.chunk_tokens)
            computing_s += chunks * timing.step_s(node.running)
        flight.prefilled_at_s = now_s + timing.hop_s + computing_s
        self._push(flight.prefilled_at_s, _Event.PREFILLED, flight)

    def _take(self, node: LoadNode, hash_ids: tuple[int, ...]) -> int:
        hits, events = node.take(hash_ids, self.timing.cache_blocks)
        if events.events:
            self._holdings.events(node.life, events, 0.0)
        return hits

    def _prefilled(self, flight: _Flight, now_s: float) -> None:
        """The first token leaves; the blocks have been on their way while the prompt was computed."""
        request, timing = flight.request, self.timing
        assert flight.decode is not None
        node = flight.prefill or flight.decode
        node.computing = None
        node.prompt_tokens -= flight.uncomputed_tokens
        if node.prompts:
            self._compute(heapq.heappop(node.prompts)[2], node, now_s)
        flight.ttft_s = now_s + 2 * timing.hop_s - request.at_s
        self.result.ttft_s.append(flight.ttft_s)
        assert flight.began_at_s is not None
        self.result.parts.queued_s.append(flight.dispatched_at_s - request.at_s)
        self.result.parts.waited_s.append(flight.began_at_s - timing.hop_s - flight.dispatched_at_s)
        self.result.parts.computed_s.append(now_s - flight.began_at_s)
        self.result.ttft_by_priority.setdefault(request.priority, []).append(flight.ttft_s)
        self._follow(self._admission.started(flight.request_id, now_s), now_s)
        if flight.prefill is None:
            self.result.in_place += 1
            self.result.parts.transfer_s.append(0.0)
            self._handed_over(flight, now_s)
            return
        had_tokens = min(self._take(flight.decode, request.hash_ids) * TRACE_BLOCK_TOKENS, request.prompt_tokens)
        moved_tokens = request.prompt_tokens - had_tokens
        transfer_s = moved_tokens * timing.kv_bytes_per_token / timing.link_bytes_per_s
        computing_s = request.prompt_tokens / timing.prefill_tokens_per_s
        self.result.moved_tokens += moved_tokens
        tail_s = timing.hop_s + max(0.0, transfer_s - computing_s)
        self.result.parts.transfer_s.append(tail_s)
        self._push(now_s + tail_s, _Event.HANDED_OVER, flight)

    def _handed_over(self, flight: _Flight, now_s: float) -> None:
        assert flight.decode is not None
        if flight.prefill is not None:
            self._by_load["prefill"].move(flight.prefill, -1)
        self._decode(flight, flight.decode, now_s)

    def _decode(self, flight: _Flight, node: LoadNode, now_s: float) -> None:
        node.running += 1
        flight.step_s = self.timing.step_s(node.running)
        flight.stalled_s = node.stalled_s
        self._push(now_s + flight.step_s * (flight.request.output_tokens - 1), _Event.DECODED, flight)

    def _decoded(self, flight: _Flight, now_s: float) -> None:
        node = flight.decode
        assert node is not None
        if (stood_s := node.stalled_s - flight.stalled_s) > 0.0:  # as long as it stood still, it comes later
            flight.stalled_s = node.stalled_s
            flight.step_s += stood_s / max(1, flight.request.output_tokens - 1)
            self._push(now_s + stood_s, _Event.DECODED, flight)
            return
        node.running -= 1
        node.slots -= 1
        self._by_load["decode"].move(node, -1)
        self.result.inter_token_s.append(flight.step_s)
        self.result.output_tokens.append(flight.request.output_tokens)
        self.result.end_to_end_s.append(now_s - flight.request.at_s)
        self.result.good += flight.ttft_s <= TTFT_GOAL_S and flight.step_s <= INTER_TOKEN_GOAL_S
        self.result.ended.append((now_s, flight.request.prompt_tokens + flight.request.output_tokens))
        self._admission.delivered(flight.request_id, flight.request.output_tokens)
        if node.queue:
            node.slots += 1
            self._ask_for_prompt(heapq.heappop(node.queue)[2], now_s)
        del self._flights[flight.request_id]
        self._follow(self._admission.leave(flight.request_id, now_s), now_s)
