"""The prefill node: its shell, and the hand-overs that it serves to decode nodes.

Knows who may ask, what order a stream has, and when a block may be read. Invariants: a block is read only between the
engine's ChunkReady and the Release that ends every hand-over, whatever ended it; Progress is said only for an engine
that reports, so that silence means a fault.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, assert_never

from kvcache import transfer
from kvcache.directory import BlockDirectory
from kvcache.handshake import check_peer
from kvcache.registry import NodeRegistry
from pipelines.node.arrival import check_arrival
from pipelines.node.ended_fences import EndedFences
from pipelines.node.prefill_request import PrefillRequest
from pipelines.node.session import Session
from pipelines.node.session_service import Server, grpc_server
from pipelines.node.shell import NodeShell
from pipelines.node.stream_port import StreamPort
from pipelines.node.stream_service import StreamMethod
from pipelines.runtime import messages
from pipelines.runtime.messages import ChunkReady, Failed, StepReport
from pipelines.runtime.port import EnginePort
from pipelines.types import wire
from pipelines.types.frames import Submit
from pipelines.types.handover import FirstToken, HandOverMessage, Progress, Refusal, Welcome
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.hand_over import Blocks, Commit, HandOver
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.deadline import Deadline
from pronghorn.errors import (
    DeadlineExceeded,
    EngineDied,
    ErrorRecord,
    HandshakeRefused,
    InternalError,
    NodeRefused,
    PronghornError,
)
from pronghorn.ids import Fence, Incarnation, NodeName
from pronghorn.ledger import Held, Kind
from pronghorn.tasks import Owner
from pronghorn.wire import PREFILL_METHOD

log = logging.getLogger(__name__)

ROLE: Final = "prefill"


class _Held:
    """A hand-over, and what wakes the stream that serves it."""

    def __init__(self, request: PrefillRequest, now_s: float) -> None:
        self.request = request
        self.since_s = now_s
        self.deadline = Deadline.after(now_s, request.budget_s)
        self.hand_over = HandOver(request.wanted)
        self.sent: dict[int, bytes] = {}
        """Digest of each block sent, by position: what the commit says."""
        self.wake = asyncio.Event()
        self.bringing: asyncio.Task[None] | None = None
        """While the beginning of the prompt may come from elsewhere."""
        self.fetched_bytes: dict[str, int] = {}
        """Of what came, by source."""


class PrefillNode:
    def __init__(
        self,
        *,
        name: NodeName,
        config: PrefillNodeConfig,
        hash_seed: bytes,
        engine: EnginePort,
        registry: NodeRegistry,
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
        self._clock = clock
        self._link = self.shell.link
        self._held: dict[Fence, _Held] = {}
        self._ended = EndedFences()
        self._bringing = Owner(f"{name}/bringing")
        self._changed = asyncio.Event()
        """A hand-over has begun or ended since this was cleared."""

    async def start(self) -> None:
        await self.shell.start(self, [StreamMethod(PREFILL_METHOD, self.frames)])

    # --- from orchestrators -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._held)

    @property
    def local_prefill_room_tokens(self) -> None:
        return None

    def submit(self, session: Session, frame: Submit) -> None:
        raise NodeRefused(f"{self.shell.name} is a prefill node; requests go to decode nodes", code="wrong_role")

    def abort(self, session: Session, fence: Fence) -> None:
        """Nothing: an orchestrator holds no attempt here."""

    def session_closed(self, session: Session) -> None:
        """Nothing: hand-overs belong to decode nodes."""

    def sweep(self, now_s: float) -> None:
        """The engine keeps the deadlines too; here it is for an engine that does not get to it."""
        for held in self._held.values():
            if held.deadline.passed(now_s) and not held.hand_over.over:
                doing = held.hand_over.state.value
                error = DeadlineExceeded(f"the request's deadline passed on {self.shell.name} while {doing}")
                held.hand_over.fail(error.record())
                held.wake.set()

    def holds(self) -> set[str]:
        return {str(fence) for fence in self._held}

    def overdue_s(self, now_s: float) -> float:
        return max((now_s - held.deadline.expires_at_s for held in self._held.values()), default=0.0)

    def held(self, now_s: float) -> list[Held]:
        tasks = [Held(Kind.TASK, name) for name in self._bringing.running]
        return tasks + [
            Held(
                Kind.HAND_OVER,
                str(fence),
                age_s=now_s - held.since_s,
                peer=Incarnation(held.request.asker.incarnation),
                note=held.hand_over.state.value,
            )
            for fence, held in self._held.items()
        ]

    # --- from the engine ----------------------------------------------------------------------------------------------

    def on_report(self, report: StepReport) -> None:
        for event in report.events:
            held = self._held.get(event.fence)
            if held is None:
                continue  # released meanwhile
            match event:
                case ChunkReady():
                    held.hand_over.on_chunk(event)
                case messages.FirstToken():
                    held.hand_over.on_first_token(
                        FirstToken(
                            token=event.token,
                            log_probabilities=event.log_probabilities,
                            siblings=event.siblings,
                            prompt_log_probabilities=event.prompt_log_probabilities,
                            num_cached_tokens=event.num_cached_tokens,
                            fetched_bytes=held.fetched_bytes,
                        )
                    )
                case Failed(error=error):
                    held.hand_over.fail(error)
                case _:
                    raise InternalError(f"a prefill engine reported a {type(event).__name__}")
            held.wake.set()

    def fail_all(self, error: PronghornError) -> None:
        for held in self._held.values():
            held.hand_over.fail(error.record())
            held.wake.set()

    # --- hand-overs ---------------------------------------------------------------------------------------------------

    async def frames(
        self, data: bytes, carriage: transfer.Carriage = transfer.IN_FRAMES
    ) -> AsyncGenerator[bytes, None]:
        """The frames of the hand-over that `data` asks for. Closing the generator, at any point, frees its blocks."""
        try:
            request = self._accept(data)
        except PronghornError as error:
            self.counters.count("hand_over_refused", self._reason(error))
            log.warning("%s: a hand-over was refused: %s", self.shell.name, error.message)
            yield _say(Refusal(error.record()))
            return
        held = self._held[request.fence] = _Held(request, self._clock.now_s())
        self._changed.set()
        try:
            yield _say(Welcome(self.shell.identity.to_hello().SerializeToString()))
            async with aclosing(self._serve(held, carriage)) as stream:
                async for frame in stream:
                    yield frame
        finally:
            if held.bringing is not None:
                held.bringing.cancel()  # before the release: it gives the engine nothing any more
            self._link.release(request.fence)
            del self._held[request.fence]
            self._ended.add(request.fence)
            self._changed.set()
            self.counters.count("hand_over_ended", held.hand_over.state.value)

    def _accept(self, data: bytes) -> PrefillRequest:
        """The request, checked. Raises the refusal."""
        request = PrefillRequest.from_bytes(data)
        if request.prefill_incarnation != self.shell.incarnation:
            raise HandshakeRefused(
                f"incarnation: the hand-over is for {request.prefill_incarnation}, this is {self.shell.incarnation}",
                param="incarnation",
            )
        check_peer(self.shell.identity, request.asker)
        self.shell.require_room()
        if request.fence in self._held:
            raise NodeRefused(f"{request.fence} is being handed over already", code="repeated")
        if request.fence in self._ended:
            raise NodeRefused(f"{request.fence} was handed over already", code="repeated")
        check_arrival(request.context, request.budget_s, self._link.ready)
        return request

    def _reason(self, error: PronghornError) -> str:
        """A name for the refusal's counter. A field that only the asker's layout has is the asker's word: no name."""
        field = error.param or error.code
        layout, dot, name = field.partition(".")
        return layout if dot and name not in self.shell.identity.layout else field

    async def _serve(self, held: _Held, carriage: transfer.Carriage) -> AsyncGenerator[bytes, None]:
        request = held.request
        if self.shell.exchange.loader.may_help(request.context):
            held.bringing = self._bringing.start(self._bring(held), f"{request.fence}<-elsewhere")
            held.bringing.add_done_callback(partial(self._bringing_ended, held))
        else:
            self._begin(held)
        while True:
            step = held.hand_over.take(carriage.blocks_per_frame(self._link.memory.block_bytes))
            match step:
                case None:
                    if held.hand_over.over:
                        return
                    if not await self._woken(held) and self._link.quiet_s < self._config.quiet_engine_s:
                        yield _say(Progress())
                case FirstToken():
                    yield _say(step)
                case Blocks(pairs=pairs):
                    blocks = ((position, self._link.memory.block(block)) for position, block in pairs)
                    for frame in carriage.encode(blocks, held.sent):
                        yield frame
                    self.counters.count("blocks_sent", n=len(pairs))
                case Commit():
                    yield transfer.encode_commit(held.sent)
                case ErrorRecord():
                    log.warning("%s: hand-over of %s failed: %s", self.shell.name, request.fence, step.message)
                    yield _say(Refusal(step))
                case never:
                    assert_never(never)

    async def _bring(self, held: _Held) -> None:
        """Get what others have of the prompt, then have the rest computed."""
        async with self.shell.exchange.loader.brought(held.request.context, held.deadline) as size_bytes:
            held.fetched_bytes = dict(size_bytes)
            self._begin(held)

    def _bringing_ended(self, held: _Held, task: asyncio.Task[None]) -> None:
        held.bringing = None
        if not task.cancelled() and (bug := task.exception()) is not None:
            error = InternalError(f"bringing the beginning of a prompt failed: {bug!r}")
            held.hand_over.fail(error.record())
            held.wake.set()

    def _begin(self, held: _Held) -> None:
        request = held.request
        budget_s = held.deadline.remaining_s(self._clock.now_s())
        try:
            self._link.send(messages.Prefill(request.fence, request.context, request.wanted, budget_s))
        except EngineDied as error:  # before this prompt came to it
            held.hand_over.fail(NodeRefused(error.message, code=error.code).record())
            held.wake.set()
        except PronghornError as error:
            held.hand_over.fail(error.record())
            held.wake.set()

    async def _woken(self, held: _Held) -> bool:
        """Wait for news of this hand-over; False after `progress_period_s` without."""
        try:
            async with asyncio.timeout(self._config.progress_period_s):
                await held.wake.wait()
        except TimeoutError:
            return False
        held.wake.clear()
        return True

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def at_rest(self) -> None:
        """Wait until no hand-over has run for `linger_s`."""
        while True:
            self._changed.clear()
            if self._held:
                await self._changed.wait()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.linger_s):
                    await self._changed.wait()
                continue
            return

    async def drain(self, timeout_s: float) -> None:
        await self.shell.drain(timeout_s)

    async def stop(self, grace_s: float) -> None:
        """The streams belong to the server, which has stopped by now."""
        await self._bringing.stop(grace_s)


def _say(message: HandOverMessage) -> bytes:
    return transfer.encode_message(wire.encode(message))
