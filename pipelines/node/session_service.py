"""The gRPC server of a node of either kind: sessions with orchestrators, the status question, an operator's farewell.

Knows streams. What a frame means is the host's to say. Invariants: one task writes on a stream (concurrent writes
kill a gRPC stream) and one reads; whatever ends a stream, the host hears `session_closed` once for every session
that it has seen. gRPC is named here, in `stream_service.py` and in `stream_client.py` only.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from kvcache.contents import CacheContents
from kvcache.handshake import Identity, check_peer
from pipelines.node.block_feed import NONE_KEPT, Event
from pipelines.node.session import Session
from pipelines.types import wire
from pipelines.types.frames import (
    HEARTBEAT_PERIOD_S,
    Abort,
    DropPrefixCache,
    Heartbeat,
    NodeReport,
    OrchestratorFrame,
    ResendBlocks,
    Submit,
)
from pronghorn.clock import Clock
from pronghorn.credentials import Credentials
from pronghorn.errors import ConfigurationError, HandshakeRefused, PronghornError
from pronghorn.ids import Fence, Incarnation
from pronghorn.ledger import Held, Kind
from pronghorn.tasks import Owner
from pronghorn.wire import DRAIN_METHOD, SERVER_CHANNEL_OPTIONS, SESSION_METHOD, STATUS_METHOD
from protos import node_pb2

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
TASK_GRACE_S = 1.0

Context = aio.ServicerContext[Any, Any]
MethodHandlers = grpc.GenericRpcHandler
Server = aio.Server
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


class SessionHost(Protocol):
    """The node behind the sessions. No method blocks or raises: what goes wrong is said to the session."""

    @property
    def identity(self) -> Identity: ...

    @property
    def contents(self) -> CacheContents: ...

    @property
    def kept(self) -> Mapping[str, CacheContents]:
        """What each of its tiers reaches."""

    def report(self) -> NodeReport: ...

    def submit(self, session: Session, frame: Submit) -> None: ...

    def abort(self, session: Session, fence: Fence) -> None: ...

    def drop_prefix_cache(self) -> None: ...

    def session_closed(self, session: Session) -> None: ...

    def dismiss(self, grace_s: float | None) -> None: ...


def method_handlers(*methods: tuple[str, Handler]) -> MethodHandlers:
    """A generic handler for full method names ("/service/Method") of one service, all of raw bytes."""
    service = methods[0][0].split("/")[1]
    return grpc.method_handlers_generic_handler(service, {name.split("/")[2]: handler for name, handler in methods})


def _check_orchestrator(ours: Identity, theirs: Identity) -> None:
    """HandshakeRefused naming the field. Layouts are not compared: an orchestrator holds no blocks."""
    if theirs.role != "orchestrator":
        raise HandshakeRefused(f"role: sessions are for orchestrators, {theirs.name} is a {theirs.role}", param="role")
    check_peer(ours, theirs, compare_layout=False)
    if theirs.seed_digest != ours.seed_digest:
        raise HandshakeRefused(
            f"seed_digest: {theirs.name} has {theirs.seed_digest!r}, {ours.name} has {ours.seed_digest!r}",
            param="seed_digest",
        )


def grpc_server() -> Server:
    return aio.server(options=SERVER_CHANNEL_OPTIONS)


class SessionService:
    def __init__(
        self,
        host: SessionHost,
        clock: Clock,
        new_server: Callable[[], Server] = grpc_server,
        credentials: Credentials | None = None,
    ) -> None:
        self._host = host
        self._clock = clock
        self._new_server = new_server
        self._credentials = credentials or Credentials()
        self._sessions: dict[Session, None] = {}  # a dict for its order
        self._server: Server | None = None

    def bind(self, bind_host: str, port: int, others: Sequence[MethodHandlers] = ()) -> int:
        """Take the port, for the methods of `others` beside our own; the port that was bound. Serves from `start` on.

        Raises ConfigurationError naming the address where it cannot be bound.
        """
        server = self._new_server()
        session: Handler = grpc.stream_stream_rpc_method_handler(self._session)
        status: Handler = grpc.unary_unary_rpc_method_handler(self._status)
        drain: Handler = grpc.unary_unary_rpc_method_handler(self._drain)
        ours = method_handlers((SESSION_METHOD, session), (STATUS_METHOD, status), (DRAIN_METHOD, drain))
        server.add_generic_rpc_handlers([ours, *others])
        try:
            bound_port = self._credentials.add_port(server, f"{bind_host}:{port}")
        except RuntimeError as error:
            raise ConfigurationError(f"cannot bind the node's gRPC server to {bind_host}:{port}") from error
        self._server = server
        return bound_port

    async def start(self) -> None:
        assert self._server is not None, "the server was not bound"
        await self._server.start()

    def held(self) -> list[Held]:
        """The sessions, and what waits for them."""
        peers = [(s.peer.name, Incarnation(s.peer.incarnation), s.unsaid) for s in self._sessions]
        sessions = [Held(Kind.SESSION, name, peer=peer) for name, peer, _ in peers]
        return sessions + [Held(Kind.UNSAID, name, unsaid, peer=peer) for name, peer, unsaid in peers if unsaid]

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def ask_beats(self) -> None:
        """Tell every orchestrator now what the next heartbeat would have told it."""
        for session in self._sessions:
            session.ask_beat()

    def cache_changed(self, events: Sequence[Event], kept: Mapping[str, Sequence[Event]] = NONE_KEPT) -> None:
        """Tell every orchestrator; the host's `contents`, or `kept`, have the changes already."""
        for session in self._sessions:
            session.cache_changed(events, kept)

    async def stop(self, grace_s: float) -> None:
        """Take no new stream, end the sessions, give other streams `grace_s`, then cut what is left."""
        for session in self._sessions:
            session.end("the node has stopped")
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _status(self, request: bytes, context: Context) -> bytes:
        return wire.encode(self._host.report())

    async def _drain(self, request: bytes, context: Context) -> bytes:
        """Begin to leave; the report is that of a node that does. How it goes on is asked for with Status."""
        try:
            asked = node_pb2.DrainRequest.FromString(request)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no DrainRequest")
        ours = self._host.identity.incarnation
        if asked.incarnation != ours:
            said = f"incarnation: the drain is of {asked.incarnation!r}, this is {ours}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, said)
        grace_s = asked.grace_s if asked.HasField("grace_s") else None
        if grace_s is not None and not 0.0 <= grace_s < math.inf:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"grace_s is {grace_s}; it must be a finite number from 0 on"
            )
        self._host.dismiss(grace_s)
        return wire.encode(self._host.report())

    async def _session(self, requests: object, context: Context) -> None:
        session = Session(await self._greet(context))
        self._sessions[session] = None
        owner = Owner(f"session-{session.peer.name}", lambda task, error: session.end(f"{task} failed: {error!r}"))
        owner.start(self._read(session, context), "reader")
        writer = owner.start(self._write(session, context), "writer")
        log.info("%s: session with %s begins", self._host.identity.name, session.peer.name)
        try:
            await session.over()
            await asyncio.wait([writer], timeout=TASK_GRACE_S)
        finally:
            self._sessions.pop(session, None)
            self._host.session_closed(session)
            reason = session.end_reason or "the stream was cancelled"
            log.info("%s: session with %s ends: %s", self._host.identity.name, session.peer.name, reason)
            await owner.stop(TASK_GRACE_S)

    async def _greet(self, context: Context) -> Identity:
        """Hellos, both ways; a peer that does not fit is refused with the reason in the stream's status."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
            if not isinstance(first, bytes):
                raise HandshakeRefused("the session ended before its hello")
            peer = Identity.from_hello(node_pb2.Hello.FromString(first))
            _check_orchestrator(self._host.identity, peer)
        except HandshakeRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be a Hello")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello came within {HELLO_TIMEOUT_S} s")
        await context.write(self._host.identity.to_hello().SerializeToString())
        return peer

    async def _read(self, session: Session, context: Context) -> None:
        try:
            while isinstance(data := await context.read(), bytes):
                self._handle(session, wire.decode(data, OrchestratorFrame))
            session.end("the orchestrator has closed it")
        except PronghornError as error:
            session.end(f"a frame could not be read: {error.message}")
        except aio.BaseError as error:
            session.end(f"the stream broke: {error}")

    def _handle(self, session: Session, frame: OrchestratorFrame) -> None:
        match frame:
            case Submit():
                self._host.submit(session, frame)
            case Abort(fence=fence):
                self._host.abort(session, fence)
            case DropPrefixCache():
                self._host.drop_prefix_cache()
            case ResendBlocks():
                session.resend_blocks()

    async def _write(self, session: Session, context: Context) -> None:
        """The stream's one writer."""
        try:
            await self._write_frames(session, context)
        except aio.BaseError as error:
            session.end(f"the stream broke: {error}")

    async def _write_frames(self, session: Session, context: Context) -> None:
        """Outputs as they come, a beat when it is due or asked for, block events a frame at a time behind them; at the
        end what is still unsaid."""
        beat_due_s = self._clock.now_s()
        while session.end_reason is None:
            if (outputs := session.take()) is not None:
                await context.write(wire.encode(outputs))
            if session.take_beat() or self._clock.now_s() >= beat_due_s:
                await context.write(wire.encode(Heartbeat(self._host.report())))
                beat_due_s = self._clock.now_s() + HEARTBEAT_PERIOD_S
            if (events := session.blocks.take(self._host.contents, self._host.kept)) is not None:
                await context.write(wire.encode(events))
            if session.blocks.idle:
                await session.wait(max(0.0, beat_due_s - self._clock.now_s()))
        if (outputs := session.take()) is not None:
            await context.write(wire.encode(outputs))
