"""The decode node: its shell, the attempts that it holds, and the pulls that bring their blocks.

Knows which attempt belongs to which session, and runs the effects that `attempt.py` decides. Invariants: a fence is
held from `submit` until its attempt has ended, and not again; a pull's end is heard from its task's end, so that no
write can follow; the engine hears of every attempt's end.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

from decode_nodes.attempt import (
    Attempt,
    AttemptState,
    Effect,
    Say,
    SayFailure,
    StartBringing,
    StartFetch,
    StartPull,
    StopBringing,
    StopFetch,
    StopPull,
    Tell,
)
from decode_nodes.config import DecodeNodeConfig
from decode_nodes.pull import pull
from kvcache.connector import Landed
from kvcache.directory import BlockDirectory
from kvcache.registry import NodeRegistry
from kvcache.transfer import BlockReceiver
from pipelines.node.arrival import check_arrival, check_window
from pipelines.node.ended_fences import EndedFences
from pipelines.node.prefill_request import PrefillRequest
from pipelines.node.session import Session
from pipelines.node.session_service import Server, grpc_server
from pipelines.node.shell import NodeShell
from pipelines.node.stream_port import StreamPort
from pipelines.runtime.messages import Admit, Failed, PrefillHere, Release, Reserved, StepReport, TokenDelta
from pipelines.runtime.port import EnginePort
from pipelines.types.frames import Pulled, Submit
from pipelines.types.handover import FirstToken
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.deadline import Deadline
from pronghorn.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    InternalError,
    NodeRefused,
    Overloaded,
    PronghornError,
    RequestInProgress,
)
from pronghorn.ids import Fence, Incarnation, NodeName
from pronghorn.ledger import Held, Kind
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

ROLE: Final = "decode"
RETRY_AFTER_S = 1.0


class _Held:
    """An attempt, who asked for it, and its pull while there is one."""

    def __init__(self, attempt: Attempt, session: Session, since_s: float) -> None:
        self.attempt = attempt
        self.session = session
        self.since_s = since_s
        self.pull: asyncio.Task[PronghornError | None] | None = None
        self.bringing: asyncio.Task[None] | None = None
        self.fetching: asyncio.Task[Landed] | None = None
        self.puller: Incarnation | None = None
        """The prefill node that `pull` reads from."""


class DecodeNode:
    def __init__(
        self,
        *,
        name: NodeName,
        config: DecodeNodeConfig,
        hash_seed: bytes,
        engine: EnginePort,
        registry: NodeRegistry,
        prefill: StreamPort,
        fetch: StreamPort,
        clock: Clock,
        directory: BlockDirectory | None = None,
        counters: Counters | None = None,
        new_server: Callable[[], Server] = grpc_server,
    ) -> None:
        self.counters = counters or Counters()
        self.shell = NodeShell(
            role=ROLE,
            name=name,
            hash_seed=hash_seed,
            config=config.node,
            engine=engine,
            registry=registry,
            fetch=fetch,
            directory=directory,
            clock=clock,
            counters=self.counters,
            new_server=new_server,
        )
        self._config = config
        self._link = self.shell.link
        self._prefill = prefill
        self._clock = clock
        self._held: dict[Fence, _Held] = {}
        self._by_key: dict[str, _Held] = {}
        """The newest attempt of each request that its client has named."""
        self._ended = EndedFences()
        self._pulls = Owner(f"{name}/pulls")
        self._rest = asyncio.Event()
        self._rest.set()

    async def start(self) -> None:
        self._pulls.start(self._close_idle_channels(), "idle-channels")
        await self.shell.start(self)

    # --- from orchestrators -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._held)

    @property
    def local_prefill_room_tokens(self) -> int:
        waiting_tokens = sum(held.attempt.local_prefill_tokens for held in self._held.values())
        return max(0, self._config.max_local_prefill_tokens - waiting_tokens)

    def submit(self, session: Session, frame: Submit) -> None:
        if frame.fence.incarnation != self.shell.incarnation:
            raise NodeRefused(
                f"incarnation: the request is for {frame.fence.incarnation}, this is {self.shell.incarnation}",
                code="wrong_incarnation",
            )
        if frame.fence in self._held:
            # The same attempt said twice is one attempt; its own last word still comes.
            self.counters.count("submit_repeated")
            return
        if frame.fence in self._ended:
            raise NodeRefused(f"{frame.fence} has ended here already", code="repeated")
        self._require_alone(session, frame)
        check_arrival(frame.context, frame.budget_s, self._link.ready)
        check_window(frame.context)
        now_s = self._clock.now_s()
        deadline = Deadline.after(now_s, frame.budget_s)
        attempt = Attempt(frame, deadline, self._config.node.engine.block_tokens)
        held = self._held[frame.fence] = _Held(attempt, session, now_s)
        if frame.key is not None:
            self._by_key[frame.key] = held
        self._rest.clear()
        self.counters.count("submitted")
        may_bring = self.shell.exchange.loader.may_help(frame.context) if not frame.prefill else False
        self._run(held, attempt.begin(frame.budget_s, may_bring))

    def _require_alone(self, session: Session, frame: Submit) -> None:
        """Raises RequestInProgress where another orchestrator runs the request that its client names so."""
        held = None if frame.key is None else self._by_key.get(frame.key)
        if held is not None and held.session.peer.incarnation != session.peer.incarnation:
            raise RequestInProgress(
                f"request {frame.key!r} runs on {self.shell.name} for {held.session.peer.name} already",
                param="X-Request-ID",
                retry_after_s=RETRY_AFTER_S,
            )

    def abort(self, session: Session, fence: Fence) -> None:
        held = self._held.get(fence)
        if held is not None and held.session is session:
            self.counters.count("aborted")
            self._run(held, held.attempt.cancel(None))

    def session_closed(self, session: Session) -> None:
        for held in list(self._held.values()):
            if held.session is session:
                self.counters.count("orphaned")
                self._run(held, held.attempt.cancel(None))

    # --- from the engine ----------------------------------------------------------------------------------------------

    def on_report(self, report: StepReport) -> None:
        for event in report.events:
            held = self._held.get(event.fence)
            if held is None:
                continue  # released meanwhile
            match event:
                case Reserved():
                    self._run(held, held.attempt.on_reserved(event))
                case TokenDelta():
                    self._run(held, held.attempt.on_tokens(event))
                case Failed():
                    self._run(held, held.attempt.on_failed(event))
                case _:
                    raise InternalError(f"a decode engine reported a {type(event).__name__}")

    def fail_all(self, error: PronghornError) -> None:
        for held in list(self._held.values()):
            self._run(held, held.attempt.cancel(error))

    def sweep(self, now_s: float) -> None:
        for held in list(self._held.values()):
            if held.attempt.deadline.passed(now_s):
                doing = held.attempt.state.value
                error = DeadlineExceeded(f"the request's deadline passed on {self.shell.name} while {doing}")
                self._run(held, held.attempt.cancel(error))

    def holds(self) -> set[str]:
        return {str(fence) for fence in self._held}

    def overdue_s(self, now_s: float) -> float:
        return max((now_s - held.attempt.deadline.expires_at_s for held in self._held.values()), default=0.0)

    def held(self, now_s: float) -> list[Held]:
        rows = [Held(Kind.TASK, name) for name in self._pulls.running]
        rows += [Held(Kind.CHANNEL, address) for address in self._prefill.channels()]
        for fence, held in self._held.items():
            age_s, peer = now_s - held.since_s, Incarnation(held.session.peer.incarnation)
            rows.append(Held(Kind.ATTEMPT, str(fence), age_s=age_s, peer=peer, note=held.attempt.state.value))
            if held.pull is not None:
                rows.append(Held(Kind.PULL, str(fence), peer=held.puller))
        return rows

    # --- effects ------------------------------------------------------------------------------------------------------

    def _run(self, held: _Held, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(command=Release(fence=fence)):
                    self._link.release(fence)
                case Tell(command=command):
                    try:
                        self._link.send(command)
                    except (Overloaded, EngineDied) as error:
                        # An engine that died before the request came to it did not die of it.
                        refused = isinstance(error, EngineDied) and isinstance(command, Admit)
                        self._run(held, held.attempt.cancel(NodeRefused(error.message) if refused else error))
                case StartBringing():
                    held.bringing = self._pulls.start(self._bring(held), f"{held.attempt.fence}<-elsewhere")
                    held.bringing.add_done_callback(partial(self._bringing_ended, held))
                case StartFetch():
                    held.fetching = self._pulls.start(self._fetch(held, effect), f"{held.attempt.fence}<-others")
                    held.fetching.add_done_callback(partial(self._fetch_ended, held))
                case StopFetch():
                    assert held.fetching is not None, f"{held.attempt.fence} has no fetch to stop"
                    held.fetching.cancel()
                case StopBringing():
                    if held.bringing is not None:
                        held.bringing.cancel()
                case StartPull():
                    self._start_pull(held, effect)
                case StopPull():
                    assert held.pull is not None, f"{held.attempt.fence} has no pull to stop"
                    held.pull.cancel()
                case Say(delta=delta):
                    held.session.say(delta)
                case SayFailure(error=record):
                    self.counters.count("failed", record.code)
                    held.session.fail(held.attempt.fence, record)
                case never:
                    assert_never(never)
        if held.attempt.state is AttemptState.ENDED and self._held.pop(held.attempt.fence, None) is not None:
            self._ended.add(held.attempt.fence)
            if held.attempt.key is not None and self._by_key.get(held.attempt.key) is held:
                del self._by_key[held.attempt.key]
            if not self._held:
                self._rest.set()

    # --- what others have ---------------------------------------------------------------------------------------------

    async def _bring(self, held: _Held) -> None:
        deadline = held.attempt.deadline
        async with self.shell.exchange.loader.brought(held.attempt.context, deadline) as size_bytes:
            self._run(held, held.attempt.on_brought(deadline.remaining_s(self._clock.now_s()), size_bytes))

    def _bringing_ended(self, held: _Held, task: asyncio.Task[None]) -> None:
        held.bringing = None
        if not task.cancelled() and (bug := task.exception()) is not None:
            error = InternalError(f"bringing the beginning of a prompt failed: {bug!r}")
            self._run(held, held.attempt.cancel(error))

    async def _fetch(self, held: _Held, start: StartFetch) -> Landed:
        attempt, positions = held.attempt, sorted(start.block_ids)
        block_ids = [start.block_ids[position] for position in positions]
        loader = self.shell.exchange.loader
        return await loader.fetched(attempt.context, positions[0], block_ids, attempt.deadline, start.failed)

    def _fetch_ended(self, held: _Held, task: asyncio.Task[Landed]) -> None:
        held.fetching = None
        landed = Landed(0)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.counters.count("prefix_not_brought", "internal")
            log.error("%s: fetching the blocks of %s failed: %r", self.shell.name, held.attempt.fence, bug)
        elif not task.cancelled():
            landed = task.result()
        self._run(held, held.attempt.on_fetched(landed.blocks, landed.size_bytes))

    # --- pulls --------------------------------------------------------------------------------------------------------

    def _start_pull(self, held: _Held, start: StartPull) -> None:
        self.counters.count("pull_started")
        receiver = BlockReceiver({p: self._link.memory.block(block) for p, block in start.block_ids.items()})
        held.pull = self._pulls.start(self._pull(held, start, receiver), f"{held.attempt.fence}<-{start.target.name}")
        held.puller = start.target.incarnation
        held.pull.add_done_callback(partial(self._pull_ended, held, start, receiver))

    async def _pull(self, held: _Held, start: StartPull, receiver: BlockReceiver) -> PronghornError | None:
        attempt = held.attempt
        budget_s = attempt.deadline.remaining_s(self._clock.now_s())
        request = PrefillRequest(
            asker=self.shell.identity,
            fence=attempt.fence,
            prefill_incarnation=start.target.incarnation,
            context=attempt.context,
            wanted=sorted(start.block_ids),
            budget_s=budget_s,
        )
        try:
            async with self._prefill.stream(start.target, request.to_bytes(), budget_s) as stream:
                await pull(
                    stream,
                    ours=self.shell.identity,
                    target=start.target,
                    receiver=receiver,
                    on_first_token=partial(self._first_token, held),
                    stall_timeout_s=self._config.stall_timeout_s,
                )
        except PronghornError as error:
            return error
        return None

    def _first_token(self, held: _Held, token: FirstToken) -> None:
        self._run(held, held.attempt.on_first_token(token))

    def _pull_ended(
        self, held: _Held, start: StartPull, receiver: BlockReceiver, task: asyncio.Task[PronghornError | None]
    ) -> None:
        held.pull = None
        error: PronghornError | None
        if task.cancelled():
            error = Cancelled(f"the pull from {start.target.name} was stopped")
        elif (bug := task.exception()) is not None:
            error = InternalError(f"the pull from {start.target.name} failed: {bug!r}")
        else:
            error = task.result()
        if held.attempt.state is AttemptState.PULLING:
            record = None if error is None else error.record()
            moved_bytes = receiver.received_bytes
            held.session.pulled(Pulled(held.attempt.fence, start.target.incarnation, record, moved_bytes))
        if error is None:
            self.counters.count("blocks_received", n=len(start.block_ids))
            self.counters.count("pull_committed")
        elif held.attempt.state is AttemptState.PULLING:
            self.counters.count("pull_failed", error.code)
            log.warning(
                "%s: pull of %s from %s failed (%s): %s",
                self.shell.name,
                held.attempt.fence,
                start.target.name,
                error.code,
                error.message,
            )
        may_fetch = error is not None and self.shell.exchange.loader.may_help(held.attempt.context)
        effects = held.attempt.on_pull_end(error, self.local_prefill_room_tokens, may_fetch)
        self._count_fallback(effects)
        self._run(held, effects)

    def _count_fallback(self, effects: list[Effect]) -> None:
        """What is done about a hand-over that failed: another prefill node, this one itself, or nothing."""
        for effect in effects:
            match effect:
                case StartPull():
                    self.counters.count("prefill_fallback", "another")
                case StartFetch() | Tell(command=PrefillHere()):
                    self.counters.count("prefill_fallback", "local")
                case SayFailure():
                    self.counters.count("prefill_fallback", "refused")
                case _:
                    pass

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def at_rest(self) -> None:
        await self._rest.wait()

    async def drain(self, timeout_s: float) -> None:
        await self.shell.drain(timeout_s)

    async def stop(self, grace_s: float) -> None:
        await self._pulls.stop(grace_s)
        await self._prefill.close()

    async def _close_idle_channels(self) -> None:
        while True:
            await asyncio.sleep(self._config.idle_channel_s / 2)
            await self._prefill.close_idle()
