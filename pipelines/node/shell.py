"""What both kinds of node are made of: an engine, a server for sessions, a row in the registry, and one state.

Knows how a node starts, says that it is healthy, drains and stops. What a report or a submitted request means is the
work's to say (`NodeWork`: `prefill_nodes/node.py`, `decode_nodes/node.py`).
Invariants: registered only after a healthy check, and out of the registry before it refuses work; everything that
runs belongs to one owner; nothing touches the block memory once the engine is stopped.

    STARTING -> SERVING -> DRAINING -> STOPPED      and to STOPPED from everywhere
"""

import asyncio
import contextlib
import enum
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from kvcache.block_digests import BlockDigests
from kvcache.contents import CacheContents
from kvcache.directory import BlockDirectory
from kvcache.handshake import Identity
from kvcache.hashing import seed_digest
from kvcache.registration import Registration
from kvcache.registry import NodeRecord, NodeRegistry
from kvcache.transfer import Digest
from operations.metrics import Metrics, Reading
from operations.port import Operations
from operations.server import OperationsServer
from pipelines.node import local_connection
from pipelines.node.batch_log import BatchLog
from pipelines.node.block_feed import events_of
from pipelines.node.cache_exchange import CacheExchange
from pipelines.node.config import NodeConfig
from pipelines.node.engine_link import EngineLink
from pipelines.node.grace import Grace
from pipelines.node.local_server import LocalServer
from pipelines.node.readiness import Strays, overdue_reason, silence_reason
from pipelines.node.session import Session
from pipelines.node.session_service import Server, SessionService, grpc_server
from pipelines.node.stream_port import StreamPort
from pipelines.node.stream_service import StreamMethod
from pipelines.runtime.messages import ResetPrefixCache, StepReport
from pipelines.runtime.port import EnginePort
from pipelines.types.frames import HEARTBEAT_PERIOD_S, NodeReport, Submit
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.credentials import Credentials
from pronghorn.errors import EngineDied, NodeLost, NodeRefused, Overloaded, PronghornError, Unavailable
from pronghorn.ids import Fence, NodeName, new_incarnation
from pronghorn.ledger import Held, Kind, Ledger
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)


STOCK_PERIOD_S = 2.0
"""How often an engine that holds blocks is asked whose they are."""
STOCK_WITHIN_S = 2.0
"""What an engine may take to answer whoever asks for the ledger: a step, and some."""


class NodeState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    NodeState.STARTING: frozenset({NodeState.SERVING, NodeState.STOPPED}),
    NodeState.SERVING: frozenset({NodeState.DRAINING, NodeState.STOPPED}),
    NodeState.DRAINING: frozenset({NodeState.STOPPED}),
    NodeState.STOPPED: frozenset(),
}


class NodeWork(Protocol):
    """What a room does with its node. Only `submit` raises; only `at_rest` and `stop` wait."""

    @property
    def in_flight(self) -> int: ...

    @property
    def local_prefill_room_tokens(self) -> int | None:
        """As in `NodeReport`."""

    def submit(self, session: Session, frame: Submit) -> None:
        """Take the request; raises a PronghornError where it is refused."""

    def abort(self, session: Session, fence: Fence) -> None: ...

    def session_closed(self, session: Session) -> None: ...

    def on_report(self, report: StepReport) -> None: ...

    def sweep(self, now_s: float) -> None:
        """Called every HEARTBEAT_PERIOD_S."""

    def held(self, now_s: float) -> list[Held]:
        """What the work holds for requests, and its tasks."""

    def holds(self) -> set[str]:
        """The owners of its attempts, as the ledger names them."""

    def overdue_s(self, now_s: float) -> float:
        """How long the worst attempt is past its deadline; 0 where none is."""

    def fail_all(self, error: PronghornError) -> None:
        """The last word of everything in flight."""

    async def at_rest(self) -> None:
        """Wait until nothing is in flight, and nothing more is to be expected."""

    async def stop(self, grace_s: float) -> None:
        """End every task; on return nothing touches the block memory."""


class NodeShell:
    identity: Identity
    """Complete once `start` has returned: the layout is the engine's."""
    address: str

    def __init__(
        self,
        *,
        role: Literal["prefill", "decode"],
        name: NodeName,
        hash_seed: bytes,
        config: NodeConfig,
        engine: EnginePort,
        registry: NodeRegistry,
        fetch: StreamPort,
        directory: BlockDirectory | None,
        clock: Clock,
        counters: Counters,
        new_server: Callable[[], Server] = grpc_server,
    ) -> None:
        self.role = role
        self.name = name
        self.incarnation = new_incarnation()
        self.state = NodeState.STARTING
        self.counters = counters
        self.contents = CacheContents()
        self.link = EngineLink(engine, clock, config.engine.stall_timeout_s)
        self._batches = BatchLog(name, counters, config.batch_log_period_s)
        self._seed_digest = seed_digest(hash_seed)
        self._config = config
        self._clock = clock
        self._service = SessionService(self, clock, new_server, Credentials(config.tls))
        self.exchange = CacheExchange(
            name=name,
            seed=hash_seed,
            config=config,
            link=self.link,
            contents=self.contents,
            registry=registry,
            streams=fetch,
            directory=directory,
            registered_at_unix_s=lambda: self.registered_at_unix_s,
            identity=lambda: self.identity,
            require_serving=self.require_serving,
            tell_kept=lambda kept: self._service.cache_changed([], kept),
            clock=clock,
            counters=counters,
        )
        self._registration = Registration(registry, config.lease_s, self.record)
        self.registered_at_unix_s = time.time()
        self._owner = Owner(name, self._on_task_failure)
        self.operations_address: str | None = None
        self._local: LocalServer | None = None
        self._operations: OperationsServer | None = None
        self._strays = Strays()
        self._stock_asked_s = clock.now_s()
        self._work: NodeWork
        self._grace = Grace()
        self._leaving: asyncio.Task[None] | None = None
        self._dismissed = False
        self.when_dismissed: Callable[[], None] = lambda: None
        """What becomes of the process once a node that was dismissed has stopped: the deployment's to say."""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, work: NodeWork, streams: Sequence[StreamMethod] = ()) -> None:
        """Start engine and server; on failure nothing is left running. Raises the engine's or the server's error."""
        self._work = work
        try:
            ready = await self.link.start(self._owner, self._on_report, self._on_engine_death)
            self.identity = Identity(
                role=self.role,
                name=self.name,
                incarnation=self.incarnation,
                model=self._config.engine.model_name,
                layout=ready.layout,
                seed_digest=self._seed_digest,
            )
            streams = [*streams, self.exchange.open(ready, self._owner)]
            digest_of = BlockDigests(self.link.memory).digest
            handlers = [stream.handler(digest_of) for stream in streams]
            port = self._service.bind(self._config.bind_host, self._config.port, handlers)
            self._open_local(streams, digest_of)
            self.address = f"{self._config.dial_host}:{port}"
            await self._service.start()
            self._owner.start(self._sweep(), "sweep")
            self._move(NodeState.SERVING)
        finally:
            if self.state is NodeState.STARTING:
                await self.stop()
        log.info("node %s (%s) serves on %s", self.name, self.incarnation[:8], self.address)

    def _open_local(self, streams: Sequence[StreamMethod], digest_of: Digest) -> None:
        if not (self._config.shared_memory and local_connection.SUPPORTED):
            return
        try:
            self._local = LocalServer(self.incarnation, streams, self.link.memory, self.counters, digest_of=digest_of)
        except OSError as error:  # others reach the node through gRPC all the same
            self.counters.count("local_refused", "not_opened")
            log.warning("node %s shares no memory with nodes on this host: %s", self.name, error)

    def unhealthy_reason(self) -> str | None:
        """Why this node must be replaced; None while it is healthy. Busy and draining nodes are healthy."""
        if self.state is NodeState.STOPPED:
            return "the node has stopped"
        if self._owner.failure is not None:
            return f"one of the node's tasks failed: {self._owner.failure!r}"
        return self.link.unhealthy_reason()

    async def check_health(self) -> None:
        """Raises Unavailable with the reason where the node is unhealthy; registers it after the first good check."""
        if (reason := self.unhealthy_reason()) is not None:
            raise Unavailable(f"node {self.name} is unhealthy: {reason}")
        if self.state is NodeState.SERVING:
            self._registration.begin(self._owner)

    async def serve_operations(self) -> None:
        """Open the operations port, on the interface of the gRPC server; to be called before the node registers."""
        self._operations = OperationsServer(self.operations())
        self.operations_address = await self._operations.start(self._config.bind_host, self._config.dial_host)

    def leave(self, grace_s: float) -> None:
        """Begin to leave: out of the registry, no new work, at most `grace_s` for what runs, then stop.

        What runs still when the time is up is handed back to whoever asked for it, as NodeRefused (`draining`): no
        death of a node, and no fault of the request's. There is one drain, however often it is asked for; the shortest
        time counts.
        """
        if self.state in (NodeState.SERVING, NodeState.DRAINING):
            self._grace.within(grace_s)
        if self.state is NodeState.SERVING:
            self._move(NodeState.DRAINING)
            log.info("node %s leaves, with %d in flight and %.1f s for them", self.name, self._work.in_flight, grace_s)
            self._service.ask_beats()
            self._leaving = self._owner.start(self._depart(), "leaving")

    def dismiss(self, grace_s: float | None) -> None:
        """An operator's word: leave, then `when_dismissed`. None: the configured time."""
        self._dismissed = True
        self.leave(self._config.drain_timeout_s if grace_s is None else grace_s)

    async def drain(self, grace_s: float) -> None:
        """Leave, and wait for it. Cancelled, it leaves all the same."""
        self.leave(grace_s)
        if self._leaving is not None:
            await asyncio.wait([self._leaving])

    async def _depart(self) -> None:
        await self._registration.end()
        if not await self._grace.wait(self._work.at_rest()):
            log.warning("node %s hands back %d that are still in flight", self.name, self._work.in_flight)
            self.counters.count("handed_back", n=self._work.in_flight)
            self._work.fail_all(NodeRefused(f"node {self.name} has left while this ran on it", code="draining"))
        await self.stop()
        if self._dismissed:
            self.when_dismissed()

    async def stop(self) -> None:
        """End now: attempts fail, streams are cut, the engine goes. Idempotent."""
        if self.state is NodeState.STOPPED:
            return
        self._move(NodeState.STOPPED)
        grace_s = self._config.stop_grace_s
        self._work.fail_all(NodeLost(f"node {self.name} has stopped"))
        await self._registration.end()
        await self._service.stop(grace_s)
        if self._local is not None:
            await self._local.stop()
        await self._work.stop(grace_s)
        await self.exchange.stop()
        await self._owner.stop(grace_s)
        await self.link.stop(grace_s)
        if self._operations is not None:
            await self._operations.stop()

    def _move(self, state: NodeState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state

    async def _sweep(self) -> None:
        while True:
            self._work.sweep(self._clock.now_s())
            self._look_for_strays()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    def _on_report(self, report: StepReport) -> None:
        self._batches.note(report, self._clock.now_s())
        if report.cache_changes:
            self.contents.apply(report.cache_changes)
            self._service.cache_changed(events_of(report.cache_changes))
        self.exchange.on_report(report)
        self._work.on_report(report)
        if report.stock is not None:
            known = self._work.holds() | self.exchange.hold_names
            self._strays.note(report.stock.held, known, self._clock.now_s())

    def _look_for_strays(self) -> None:
        """Have the engine say what it holds while it holds anything; what comes is compared in `_on_report`."""
        now_s = self._clock.now_s()
        if self.link.load.held_blocks == 0:
            self._strays.clear()
        elif now_s - self._stock_asked_s >= STOCK_PERIOD_S and self.link.unhealthy_reason() is None:
            self._stock_asked_s = now_s
            with contextlib.suppress(Overloaded, EngineDied):
                self.link.ask_stock()

    def _on_engine_death(self, error: PronghornError) -> None:
        log.error("node %s: the engine is gone, %d in flight fail: %s", self.name, self._work.in_flight, error.message)
        self.counters.count("engine_died")
        self.exchange.lose()
        self._work.fail_all(error)
        self._leave_registry()

    def _on_task_failure(self, task: str, error: BaseException) -> None:
        self._work.fail_all(EngineDied(f"node {self.name}: {task} failed: {error!r}"))
        self._leave_registry()

    def _leave_registry(self) -> None:
        self._service.ask_beats()
        if self.state is not NodeState.STOPPED:
            self._owner.start(self._registration.end(), "deregistration")

    # --- what it says of itself ---------------------------------------------------------------------------------------

    @property
    def kept(self) -> Mapping[str, CacheContents]:
        return self.exchange.kept

    def report(self) -> NodeReport:
        load = self.link.load
        return NodeReport(
            name=self.name,
            role=self.role,
            model=self._config.engine.model_name,
            address=self.address,
            incarnation=self.incarnation,
            healthy=self.unhealthy_reason() is None,
            in_flight=self._work.in_flight,
            draining=self.state is NodeState.DRAINING,
            local_prefill_room_tokens=self._work.local_prefill_room_tokens,
            counters=self.counters.snapshot(),
            prompt_throughput=self._batches.prompt_throughput,
            generation_throughput=self._batches.generation_throughput,
            findable_blocks=len(self.contents),
            orchestrators=max(1, self._service.num_sessions),
            tiers=self.exchange.tiers() or msgspec.UNSET,
            **msgspec.structs.asdict(load),
        )

    def record(self) -> NodeRecord:
        return NodeRecord(
            name=self.name,
            role=self.role,
            model=self._config.engine.model_name,
            address=self.address,
            incarnation=self.incarnation,
            layout=self.identity.layout,
            seed_digest=self._seed_digest,
            load=msgspec.structs.asdict(self.link.load) | {"in_flight": self._work.in_flight},
            host=self._config.dial_host,
            pid=os.getpid(),
            registered_at_unix_s=self.registered_at_unix_s,
            operations_address=self.operations_address,
        )

    # --- to operators -------------------------------------------------------------------------------------------------

    def operations(self) -> Operations:
        return Operations(self.ready, self.ledger, Metrics(self.role, {self._config.engine.model_name: self._reading}))

    def ready(self) -> tuple[bool, str]:
        """Whether this node could do its work now. Peers have no part in it."""
        now_s, patience_s = self._clock.now_s(), self._config.unready_after_s
        reason = (
            (None if self.state is NodeState.SERVING else f"the node is {self.state.value}")
            or self.unhealthy_reason()
            or silence_reason(self.link.quiet_s, patience_s)
            or self._strays.reason(now_s, patience_s)
            or overdue_reason(self._work.overdue_s(now_s), patience_s)
        )
        return reason is None, reason or "serving"

    async def ledger(self) -> Ledger:
        stock = await self.link.stock(STOCK_WITHIN_S)
        held = self.held() + (stock or [])
        return Ledger(self.name, self.role, self.incarnation, held, engine_answered=stock is not None)

    def held(self) -> list[Held]:
        tasks = [Held(Kind.TASK, name) for name in self._owner.running]
        return self._work.held(self._clock.now_s()) + self._service.held() + self.exchange.held() + tasks

    def _reading(self) -> Reading:
        load, counters, engine = self.link.load, self.counters.snapshot(), self._config.engine
        gauges = {
            "ready": float(self.ready()[0]),
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "num_requests_awaiting_blocks": load.awaiting_blocks,
            "kv_cache_usage_perc": load.held_blocks / load.total_blocks if load.total_blocks else 0.0,
            "num_blocks": load.total_blocks,
            "num_free_blocks": load.free_blocks,
            "num_cached_blocks": load.cached_blocks,
        }
        held = [*self.held(), Held(Kind.BLOCKS, "", load.held_blocks)]
        held.append(Held(Kind.SEQUENCE, "", load.running + load.waiting + load.awaiting_blocks))
        totals = {
            "prompt_tokens": counters.pop("prompt_tokens", 0),
            "generation_tokens": counters.pop("generated_tokens", 0),
        }
        return Reading(gauges, held, counters, totals, (engine.block_tokens, load.total_blocks))

    def autoscaling_stats(self) -> dict[str, float]:
        load = self.link.load
        held_share = load.held_blocks / load.total_blocks if load.total_blocks else 0.0
        return {"in_flight": float(self._work.in_flight), "waiting": float(load.waiting), "held_share": held_share}

    # --- sessions -----------------------------------------------------------------------------------------------------

    def require_serving(self) -> None:
        """Raises NodeRefused where the node has stopped or is unhealthy."""
        if self.state is NodeState.STOPPED:
            raise NodeRefused(f"node {self.name} has stopped")
        if (reason := self.unhealthy_reason()) is not None:
            raise NodeRefused(f"node {self.name}: {reason}", code="unhealthy")

    def require_room(self) -> None:
        """Raises where the node cannot take one more: as `require_serving`, and Overloaded where it is full."""
        self.require_serving()
        if self._work.in_flight >= self._config.max_in_flight:
            raise Overloaded(f"node {self.name} holds {self._work.in_flight} attempts, its bound max_in_flight")

    def submit(self, session: Session, frame: Submit) -> None:
        try:
            if self.state is NodeState.DRAINING:
                raise NodeRefused(f"node {self.name} is leaving", code="draining")
            self.require_room()
            self._work.submit(session, frame)
        except PronghornError as error:
            self.counters.count("submit_refused", error.code)
            session.fail(frame.fence, error)

    def abort(self, session: Session, fence: Fence) -> None:
        self._work.abort(session, fence)

    def session_closed(self, session: Session) -> None:
        self._work.session_closed(session)

    def drop_prefix_cache(self) -> None:
        self.exchange.reset()
        try:
            self.link.send(ResetPrefixCache())
        except (Overloaded, EngineDied) as error:
            self.counters.count("prefix_cache_not_dropped", error.code)
            log.warning("node %s could not drop its prefix cache: %s", self.name, error.message)
