"""A load on many nodes, a phase at a time: the real router and the real admission over a model of each node's time.

Knows no token and no block of a request: a prompt is computed, handed over and decoded in one event each. Prefill nodes
compute one prompt after another, less what their cache holds of it; decode nodes run up to `max_batch` sequences, a
step being longer the more there are. The router is handed a few of the least loaded nodes of each role, which are kept
in order here, so that a choice costs the same whatever the number of nodes; where it takes the least loaded of what it
is given, that is the least loaded of all.
"""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from cluster.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest
from orchestrator.admission import Admission
from orchestrator.nodes import NodeView
from orchestrator.routing import RequestFacts, Router
from pronghorn.ids import Incarnation, NodeName, RequestID

MODEL = "model"
TTFT_GOAL_S = 2.0
INTER_TOKEN_GOAL_S = 0.05
"""A request that keeps both counts as good."""
SHORTLIST = 4
"""Nodes of each role that the router chooses from."""


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


class LoadNode:
    """One node as the model has it."""

    def __init__(self, name: str, role: Literal["prefill", "decode"]) -> None:
        self.name = name
        self.role = role
        self.load = 0
        self.free_at_s = 0.0
        self.running = 0
        self.queue: deque[_Flight] = deque()
        self.cache: OrderedDict[int, None] = OrderedDict()
        self._view: NodeView | None = None

    def view(self) -> NodeView:
        """As the router sees it; made anew only after a change of load."""
        if self._view is None or self._view.in_flight != self.load:
            self._view = NodeView(
                name=NodeName(self.name),
                role=self.role,
                model=MODEL,
                address=self.name,
                incarnation=Incarnation(self.name),
                unusable=None,
                in_flight=self.load,
                waiting=len(self.queue),
                free_blocks=0,
            )
        return self._view

    def reuse(self, hash_ids: tuple[int, ...], capacity: int) -> int:
        """Leading blocks that are cached; all of them are from now on."""
        cache = self.cache
        hits = 0
        for hash_id in hash_ids:
            if hash_id not in cache:
                break
            cache.move_to_end(hash_id)
            hits += 1
        for hash_id in hash_ids[hits:]:
            cache[hash_id] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
        return hits


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

    def least(self, count: int) -> list[NodeView]:
        while not self._levels[self._least]:
            self._least += 1
        found: list[NodeView] = []
        for level in self._levels[self._least :]:
            for node in level:
                found.append(node.view())
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
    ttft_s: float = 0.0
    step_s: float = 0.0


@dataclass
class LoadResult:
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    good: int = 0
    """Requests within both goals."""
    shed: int = 0
    most_in_flight: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    routing_s: float = 0.0
    """Of the wall time, in the router; sampled."""


class LoadModel:
    def __init__(
        self, prefill: int, decode: int, router: Router, admission: Admission, timing: NodeTiming | None = None
    ) -> None:
        self.timing = timing or NodeTiming()
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
        assert all(node.load == node.running == 0 and not node.queue for node in self._named.values())
        self.result.wall_s = time.perf_counter() - began_s
        return self.result

    def _until(self, now_s: float) -> None:
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, event, flight = heapq.heappop(events)
            self.result.virtual_s = at_s
            if event is _Event.PREFILLED:
                self._prefilled(flight, at_s)
            elif event is _Event.HANDED_OVER:
                self._handed_over(flight, at_s)
            else:
                self._decoded(flight, at_s)

    def _push(self, at_s: float, event: _Event, flight: _Flight) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, event, flight))

    # --- one request --------------------------------------------------------------------------------------------------

    def _arrive(self, flight: _Flight, now_s: float) -> None:
        if self._admission.can_admit() is not None:
            self.result.shed += 1
            return
        self._flights[flight.request_id] = flight
        self.result.most_in_flight = max(self.result.most_in_flight, len(self._flights))
        if self._admission.enter(flight.request_id):
            self._dispatch(flight, now_s)

    def _dispatch(self, flight: _Flight, now_s: float) -> None:
        request, timing = flight.request, self.timing
        views = self._by_load["decode"].least(SHORTLIST) + self._by_load["prefill"].least(SHORTLIST)
        sampled = self._sequence % 64 == 0
        began_s = time.perf_counter() if sampled else 0.0
        route = self._router.choose(RequestFacts(MODEL, request.prompt_tokens), views)
        if sampled:
            self.result.routing_s += 64 * (time.perf_counter() - began_s)
        decode = flight.decode = self._named[route.decode.name]
        prefill = flight.prefill = self._named[route.prefill[0].name]
        self._by_load["decode"].move(decode, 1)
        self._by_load["prefill"].move(prefill, 1)
        reused = prefill.reuse(request.hash_ids, timing.cache_blocks) * TRACE_BLOCK_TOKENS
        reused = min(reused, request.prompt_tokens - 1)
        self.result.prompt_tokens += request.prompt_tokens
        self.result.reused_tokens += reused
        starts_s = max(now_s + timing.hop_s, prefill.free_at_s)
        prefill.free_at_s = starts_s + (request.prompt_tokens - reused) / timing.prefill_tokens_per_s
        self._push(prefill.free_at_s, _Event.PREFILLED, flight)

    def _prefilled(self, flight: _Flight, now_s: float) -> None:
        """The first token leaves; the blocks have been on their way while the prompt was computed."""
        request, timing = flight.request, self.timing
        assert flight.prefill is not None
        flight.ttft_s = now_s + 2 * timing.hop_s - request.at_s
        self.result.ttft_s.append(flight.ttft_s)
        transfer_s = request.prompt_tokens * timing.kv_bytes_per_token / timing.link_bytes_per_s
        computing_s = request.prompt_tokens / timing.prefill_tokens_per_s
        self._push(now_s + timing.hop_s + max(0.0, transfer_s - computing_s), _Event.HANDED_OVER, flight)

    def _handed_over(self, flight: _Flight, now_s: float) -> None:
        assert flight.prefill is not None and flight.decode is not None
        self._by_load["prefill"].move(flight.prefill, -1)
        if flight.decode.running < self.timing.max_batch:
            self._decode(flight, flight.decode, now_s)
        else:
            flight.decode.queue.append(flight)

    def _decode(self, flight: _Flight, node: LoadNode, now_s: float) -> None:
        node.running += 1
        flight.step_s = self.timing.decode_step_s + self.timing.decode_sequence_s * node.running
        self._push(now_s + flight.step_s * (flight.request.output_tokens - 1), _Event.DECODED, flight)

    def _decoded(self, flight: _Flight, now_s: float) -> None:
        node = flight.decode
        assert node is not None
        node.running -= 1
        self._by_load["decode"].move(node, -1)
        self.result.inter_token_s.append(flight.step_s)
        self.result.output_tokens.append(flight.request.output_tokens)
        self.result.good += flight.ttft_s <= TTFT_GOAL_S and flight.step_s <= INTER_TOKEN_GOAL_S
        if node.queue:
            self._decode(node.queue.popleft(), node, now_s)
        del self._flights[flight.request_id]
        heir = self._admission.leave(flight.request_id)
        if heir is not None:
            self._dispatch(self._flights[heir], now_s)
