"""Keeps one session open with every node that the registry lists, and tells `nodes.py` what it sees.

A shell: tasks, waits and the registry's I/O, no decisions. Everything it starts belongs to its Owner. A registry that
does not answer changes nothing here: sessions live on, and what is known is kept.
"""

import asyncio
import logging
from contextlib import aclosing

from kvcache.registration import keep_seed
from kvcache.registry import NodeRecord, NodeRegistry
from orchestrator.config import OrchestratorConfig
from orchestrator.nodes import TICK_PERIOD_S, Nodes
from orchestrator.ports import NodeClient, NodeConnector, SessionListener
from pipelines.types.frames import Heartbeat, OrchestratorFrame
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import NodeLost, Unavailable
from pronghorn.ids import Incarnation
from pronghorn.ledger import Held, Kind
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)


class Membership:
    def __init__(
        self,
        config: OrchestratorConfig,
        registry: NodeRegistry,
        connector: NodeConnector,
        nodes: Nodes,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._config = config
        self._registry = registry
        self._connector = connector
        self._nodes = nodes
        self._clock = clock
        self._counters = counters
        self._owner = Owner("membership")
        self._clients: dict[Incarnation, NodeClient] = {}
        self._keepers: dict[Incarnation, asyncio.Task[None]] = {}
        self._silences: dict[Incarnation, asyncio.Timeout] = {}
        """What ends the reading of each session that is up, once it has been silent for too long."""
        self._changed = asyncio.Event()
        self.registry_answers = False

    def start(self, listener: SessionListener, seed: bytes | None = None) -> None:
        """`seed`: the cluster's, which the registry is not to lose while this runs."""
        self._owner.start(self._follow_registry(listener), "registry")
        self._owner.start(self._watch_changes(), "registry-changes")
        self._owner.start(self._watch_silence(), "silence")
        if seed is not None:
            self._owner.start(keep_seed(self._registry, seed), "seed")

    async def stop(self, grace_s: float) -> None:
        """Close every session, in at most `grace_s`."""
        await self._owner.stop(grace_s)

    @property
    def failure(self) -> BaseException | None:
        """What ended one of the tasks, which only a bug can."""
        return self._owner.failure

    @property
    def running(self) -> list[str]:
        return self._owner.running

    def held(self) -> list[Held]:
        names = self._nodes.names_by_life()
        sessions = [Held(Kind.SESSION, names.get(life, ""), peer=life) for life in self._clients]
        return sessions + [Held(Kind.TASK, name) for name in self._owner.running]

    def send(self, incarnation: Incarnation, frame: OrchestratorFrame) -> None:
        client = self._clients.get(incarnation)
        if client is None:
            raise NodeLost(f"there is no session with the node of incarnation {incarnation[:8]}")
        client.send(frame)

    def open_to(self) -> list[Incarnation]:
        return list(self._clients)

    # --- who is there ---

    async def _follow_registry(self, listener: SessionListener) -> None:
        while True:
            self._changed.clear()
            await self._list(listener)
            try:
                async with asyncio.timeout(self._config.relist_period_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # a change may have gone unannounced

    async def _list(self, listener: SessionListener) -> None:
        try:
            records = await self._registry.list()
        except Unavailable as error:
            if self.registry_answers:
                log.warning("the node registry does not answer; keeping the nodes that are known: %s", error.message)
            self.registry_answers = False
            self._counters.count("registry_unavailable")
            return
        self.registry_answers = True
        change = self._nodes.listed(records)
        for incarnation in change.replaced:
            if keeper := self._keepers.get(incarnation):
                keeper.cancel("replaced by a new incarnation")
        for record in change.joined:
            if record.incarnation in self._clients:
                # It fell out of the registry and its session was opened again before it was back in it.
                self._opened(record.incarnation)
            if record.incarnation not in self._keepers:
                log.info("node %s (%s, %s) joined", record.name, record.role, record.address)
                keeper = self._owner.start(self._keep_session(record, listener), f"session-{record.name}")
                self._keepers[record.incarnation] = keeper

    async def _watch_changes(self) -> None:
        async for _ in self._registry.changes():
            self._changed.set()

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now_s = self._clock.now_s()
            self._nodes.tick(now_s)
            for incarnation in self._nodes.silent(self._config.silence_timeout_s, now_s):
                if silence := self._silences.pop(incarnation, None):
                    silence.reschedule(loop.time())
            await asyncio.sleep(TICK_PERIOD_S)

    # --- one session after another with one life of a node ---

    async def _keep_session(self, record: NodeRecord, listener: SessionListener) -> None:
        pause_s = self._config.reconnect_min_s
        try:
            while self._nodes.registered(record.incarnation):
                if await self._hold_session(record, listener):
                    pause_s = self._config.reconnect_min_s
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.reconnect_max_s)
        finally:
            del self._keepers[record.incarnation]
        log.info("node %s left", record.name)

    async def _hold_session(self, record: NodeRecord, listener: SessionListener) -> bool:
        """One session, from connecting to its end. Returns whether the node ever spoke."""
        incarnation = record.incarnation
        client = self._connector.client(record)
        reason = "the session was closed"
        spoke = died = False
        try:
            await client.connect()
            self._clients[incarnation] = client
            self._opened(incarnation)
            async with asyncio.timeout(None) as silence, aclosing(client.frames()) as frames:
                self._silences[incarnation] = silence
                async for frame in frames:
                    spoke = True
                    self._nodes.heard(incarnation, self._clock.now_s())
                    if isinstance(frame, Heartbeat):
                        self._nodes.heartbeat(incarnation, frame.report, self._clock.now_s())
                        listener.on_heartbeat(frame.report)
                    else:
                        listener.on_frame(incarnation, frame)
        except Unavailable as error:
            reason, died = error.message, error.code == NodeLost.default_code
            if incarnation not in self._clients and self._nodes.trouble(incarnation) != reason:
                log.warning("no session with %s could be opened, trying again: %s", record.name, reason)
        except TimeoutError:
            reason = f"silent for {self._config.silence_timeout_s} s"
        finally:
            self._silences.pop(incarnation, None)
            was_up = self._clients.pop(incarnation, None) is not None
            if was_up:
                self._nodes.lost(incarnation, self._clock.now_s())
            self._nodes.closed(incarnation, reason)
            if was_up:
                self._counters.count("session_lost", record.role)
                log.warning("the session with %s ended: %s", record.name, reason)
                listener.on_lost(incarnation, reason, died)
            await client.close()
        return spoke

    def _opened(self, incarnation: Incarnation) -> None:
        self._nodes.opened(incarnation)
        self._nodes.heard(incarnation, self._clock.now_s())
