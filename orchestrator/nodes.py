"""Which nodes there are, which of them may be given work, and how loaded each is.

Pure: registry listings, session openings and closings, and heartbeats come in, with the time; views come out. It knows
lives of nodes (incarnations), never sockets.

Invariants:
- A name has at most one current life. A listing that shows a new incarnation replaces the old one.
- Silence is counted in time in which this process listened: one that was itself held up does not take its nodes for
  dead, since what they said meanwhile lies unread (`tick`).
- Usable means: session up, last word younger than the bound, healthy, not draining, breaker not open (`breaker.py`).
  The registry decides whom to connect to, not who is alive: a node that fell out of a listing stays as long as its
  session lives, so that a Redis that is away, or that came back empty, costs nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvcache.registry import NodeRecord
from orchestrator.breaker import Breaker, BreakerPolicy
from orchestrator.routing.reservation import Reservations
from pipelines.types.frames import NodeReport
from pronghorn.ids import Incarnation, NodeName

TICK_PERIOD_S = 0.2
MAX_TICK_S = 0.5
"""So much of the time between two ticks counts as listening; the rest this process was held up."""


@dataclass(frozen=True)
class NodeView:
    """One node at one moment, as the router sees it."""

    name: NodeName
    role: str
    model: str
    address: str
    incarnation: Incarnation
    unusable: str | None
    """Why it cannot be given work; None where it can."""
    in_flight: int
    """What it reported, and what this orchestrator sent since."""
    waiting: int
    free_blocks: int
    total_blocks: int = 0
    queued_tokens: int = 0
    """Of prompts, to be computed there: what it reported, and what this orchestrator gave out since."""
    local_prefill_room_tokens: int | None = None
    """Prompt tokens that a decode node would still compute in the stead of prefill nodes."""


@dataclass(frozen=True)
class MembershipChange:
    """What a listing changed: lives to connect to, and lives that another one replaced."""

    joined: list[NodeRecord]
    replaced: list[Incarnation]


@dataclass
class _Node:
    record: NodeRecord
    breaker: Breaker
    view: NodeView | None = None
    """As it was last seen, while it is usable and nothing has changed."""
    registered: bool = True
    session_up: bool = False
    trouble: str = "not connected yet"
    report: NodeReport | None = None
    heard_at_s: float = 0.0
    lost_at_s: float | None = None  # when its last session ended
    running: int = 0  # attempts of ours that have not ended
    unreported: int = 0  # those among them dispatched since its last heartbeat
    unreported_local_tokens: int = 0  # of their prompts that it computes itself

    @property
    def machine(self) -> str:
        return self.record.address.rpartition(":")[0]


class Nodes:
    def __init__(
        self,
        model: str,
        heartbeat_timeout_s: float,
        breaker_policy: BreakerPolicy | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        """`reservations`: what was given out and no heartbeat tells of yet."""
        self._model = model
        self._reservations = reservations or Reservations()
        self._breaker_policy = breaker_policy or BreakerPolicy()
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._nodes: dict[Incarnation, _Node] = {}
        self._ticked_at_s: float | None = None
        self._held_up_s = 0.0

    # --- what happens ---

    def tick(self, now_s: float) -> None:
        """Called every TICK_PERIOD_S by the loop that hears the nodes, as far as that loop runs."""
        if self._ticked_at_s is not None:
            self._held_up_s += max(0.0, now_s - self._ticked_at_s - MAX_TICK_S)
        self._ticked_at_s = now_s

    def listed(self, records: Iterable[NodeRecord]) -> MembershipChange:
        """The registry answered, with these live leases. Where it does not answer, nothing is called."""
        current = {record.incarnation: record for record in records if record.model == self._model}
        names = {record.name for record in current.values()}
        replaced = [
            incarnation
            for incarnation, node in self._nodes.items()
            if incarnation not in current and node.record.name in names
        ]
        for incarnation, node in list(self._nodes.items()):
            node.registered = incarnation in current
            if incarnation in replaced or not (node.registered or node.session_up):
                del self._nodes[incarnation]
        joined = [record for incarnation, record in current.items() if incarnation not in self._nodes]
        for record in joined:
            self._nodes[record.incarnation] = _Node(record, Breaker(self._breaker_policy))
        return MembershipChange(joined, replaced)

    def opened(self, incarnation: Incarnation) -> None:
        if node := self._changed(incarnation):
            node.session_up, node.trouble, node.report = True, "no heartbeat yet", None

    def lost(self, incarnation: Incarnation, now_s: float) -> None:
        """A session that was up has ended just now; `closed` follows."""
        if node := self._changed(incarnation):
            node.lost_at_s = self._listened_s(now_s)

    def closed(self, incarnation: Incarnation, reason: str) -> None:
        """The session ended, or could not be opened; `reason` says why."""
        node = self._changed(incarnation)
        if node is None:
            return
        node.session_up, node.trouble, node.running, node.unreported = False, reason, 0, 0
        self._reservations.forget(incarnation)
        if not node.registered:
            del self._nodes[incarnation]

    def heard(self, incarnation: Incarnation, now_s: float) -> None:
        """It said something, whatever it was; or a session was opened just now, from which silence counts."""
        if node := self._nodes.get(incarnation):
            node.heard_at_s = self._listened_s(now_s)

    def heartbeat(self, incarnation: Incarnation, report: NodeReport, now_s: float) -> None:
        self.heard(incarnation, now_s)
        if node := self._changed(incarnation):
            node.report, node.unreported, node.unreported_local_tokens = report, 0, 0
            self._reservations.heard(incarnation, now_s)

    def dispatched(self, incarnation: Incarnation, local_prefill_tokens: int = 0) -> None:
        """An attempt goes to that node, which is to compute so many tokens of its prompt itself."""
        if node := self._changed(incarnation):
            node.running += 1
            node.unreported += 1
            node.unreported_local_tokens += local_prefill_tokens

    def computed(self, incarnation: Incarnation) -> None:
        """That node computes a prompt of ours no more."""
        self._reservations.release(incarnation)

    def ended(self, incarnation: Incarnation) -> None:
        """One attempt of ours on that node is over, however it ended."""
        if (node := self._changed(incarnation)) and node.running > 0:
            node.running -= 1
            node.unreported = min(node.unreported, node.running)

    def asked(self, incarnations: Iterable[Incarnation], now_s: float) -> None:
        """A request goes to these nodes, or may."""
        for incarnation in incarnations:
            if node := self._changed(incarnation):
                node.breaker.asked(now_s)

    def let_go(self, incarnations: Iterable[Incarnation]) -> None:
        """A request that might have gone there is done with them, however they did."""
        for incarnation in incarnations:
            if node := self._changed(incarnation):
                node.breaker.let_go()

    def succeeded(self, incarnation: Incarnation, now_s: float) -> None:
        if node := self._changed(incarnation):
            node.breaker.succeeded(now_s)

    def failed(self, incarnation: Incarnation, now_s: float) -> None:
        if node := self._changed(incarnation):
            node.breaker.failed(now_s)

    def _changed(self, incarnation: Incarnation) -> _Node | None:
        """The node, whose view is to be made anew."""
        node = self._nodes.get(incarnation)
        if node is not None:
            node.view = None
        return node

    # --- what is ---

    def silent(self, bound_s: float, now_s: float) -> list[Incarnation]:
        """Whose session is up and has said nothing for longer than `bound_s`."""
        nodes = self._nodes.items()
        return [
            incarnation for incarnation, node in nodes if node.session_up and self._silence_s(node, now_s) > bound_s
        ]

    def registered(self, incarnation: Incarnation) -> bool:
        """Whether a broken session with that life is worth opening again."""
        node = self._nodes.get(incarnation)
        return node is not None and node.registered

    def trouble(self, incarnation: Incarnation) -> str | None:
        """What was last said of a session with that life that could not be opened or has ended."""
        node = self._nodes.get(incarnation)
        return None if node is None else node.trouble

    def names_by_life(self) -> dict[Incarnation, NodeName]:
        return {incarnation: node.record.name for incarnation, node in self._nodes.items()}

    def reconnecting(self, within_s: float, now_s: float) -> bool:
        """Whether a decode node's session has broken so lately that it may be opened again, or was opened again just
        now and its first heartbeat is still to come."""
        earliest_s = self._listened_s(now_s) - within_s
        return any(
            (not node.session_up or node.report is None) and node.lost_at_s is not None and node.lost_at_s > earliest_s
            for node in self._nodes.values()
            if node.record.role == "decode"
        )

    def session_up(self, incarnation: Incarnation) -> bool:
        node = self._nodes.get(incarnation)
        return node is not None and node.session_up

    def machine_gone(self, incarnation: Incarnation) -> frozenset[Incarnation]:
        """All lives on the machine of that one, whose session is over, where it was the last and not the only one."""
        lost = self._nodes.get(incarnation)
        if lost is None:
            return frozenset()
        there = {life: node for life, node in self._nodes.items() if node.machine == lost.machine}
        if len(there) == 1 or any(node.session_up for node in there.values()):
            return frozenset()
        return frozenset(there)

    def usable(self, incarnation: Incarnation, now_s: float) -> bool:
        node = self._nodes.get(incarnation)
        return node is not None and self._unusable(node, now_s) is None

    def names(self) -> set[NodeName]:
        return {node.record.name for node in self._nodes.values()}

    def layout(self) -> dict[str, str] | None:
        """Of the nodes' blocks: that of any, since nodes of one model that differ refuse each other."""
        return next((node.record.layout for node in self._nodes.values() if node.record.layout), None)

    def views(self, now_s: float) -> list[NodeView]:
        """Kept from call to call where nothing has changed: a thousand of them cost a fraction of a millisecond."""
        for incarnation in self._reservations.take_changed():
            self._changed(incarnation)
        oldest_s = self._listened_s(now_s) - self._heartbeat_timeout_s
        return [
            node.view if node.view is not None and node.heard_at_s >= oldest_s else self._view(incarnation, node, now_s)
            for incarnation, node in self._nodes.items()
        ]

    def reports(self, now_s: float) -> list[NodeReport]:
        """What each node last said of itself; one that may not be given work for silence is shown as unhealthy."""
        return [self._report(node, now_s) for node in self._nodes.values()]

    def _view(self, incarnation: Incarnation, node: _Node, now_s: float) -> NodeView:
        report = node.report
        unusable = self._unusable(node, now_s)
        view = NodeView(
            name=node.record.name,
            role=node.record.role,
            model=node.record.model,
            address=node.record.address,
            incarnation=incarnation,
            unusable=unusable,
            in_flight=max(node.running, self._in_flight(node, incarnation)),
            waiting=report.waiting if report else 0,
            free_blocks=report.free_blocks if report else 0,
            local_prefill_room_tokens=_local_room(node),
            total_blocks=report.total_blocks if report else 0,
            queued_tokens=self._reservations.tokens(incarnation) + (report.queued_tokens if report else 0),
        )
        # What speaks against a node may end by itself, with time: then it is asked anew.
        node.view = view if unusable is None else None
        return view

    def _in_flight(self, node: _Node, incarnation: Incarnation) -> int:
        """What it reported and what was sent since: by each orchestrator as much as by this one, since they all see the
        same report and decide alike until the next one."""
        if node.report is None:
            return node.unreported
        sent = node.unreported if node.record.role == "decode" else self._reservations.requests(incarnation)
        return node.report.in_flight + node.report.orchestrators * sent

    def _unusable(self, node: _Node, now_s: float) -> str | None:
        if not node.session_up or node.report is None:
            return node.trouble
        if (silence_s := self._silence_s(node, now_s)) > self._heartbeat_timeout_s:
            return f"silent for {silence_s:.1f} s"
        if node.report.draining:
            return "draining"
        return node.breaker.refusal(now_s) if node.report.healthy else "unhealthy"

    def _report(self, node: _Node, now_s: float) -> NodeReport:
        record = node.record
        if node.report is None:
            return NodeReport(
                name=record.name,
                role=record.role,
                model=record.model,
                address=record.address,
                incarnation=record.incarnation,
                healthy=False,
                in_flight=0,
                total_blocks=0,
                free_blocks=0,
                held_blocks=0,
                cached_blocks=0,
                waiting=0,
                running=0,
                awaiting_blocks=0,
            )
        reachable = node.session_up and self._silence_s(node, now_s) <= self._heartbeat_timeout_s
        return node.report if reachable else msgspec.structs.replace(node.report, healthy=False)

    def _silence_s(self, node: _Node, now_s: float) -> float:
        return self._listened_s(now_s) - node.heard_at_s

    def _listened_s(self, now_s: float) -> float:
        """The time less that in which nothing could be heard: until the next tick, no more than one may count."""
        if self._ticked_at_s is not None:
            now_s = min(now_s, self._ticked_at_s + MAX_TICK_S)
        return now_s - self._held_up_s


def _local_room(node: _Node) -> int | None:
    if node.report is None or node.report.local_prefill_room_tokens is None:
        return None
    return max(0, node.report.local_prefill_room_tokens - node.unreported_local_tokens)
