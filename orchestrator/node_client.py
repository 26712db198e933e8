"""A session with a node over gRPC: one long-lived bidirectional stream, whose first message each way is a Hello.

It knows frames and the handshake; it knows nothing of requests, and never reconnects.

A request that is aborted before its Submit was written costs no frame at all: both are forgotten, so that a storm of
requests and cancels does not fill the queue of a slow socket.

One task alone writes: a grpc.aio stream takes one outstanding write, a second one breaks it. A silent peer is noticed
by the channel's keepalive (`pronghorn/wire.py`); whatever ends the stream surfaces once, as NodeLost out of `frames`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import grpc
from google.protobuf.message import DecodeError

from kvcache.handshake import Identity, check_peer
from kvcache.registry import NodeRecord
from pipelines.types.frames import Abort, NodeFrame, OrchestratorFrame, Submit
from pipelines.types.wire import decode, encode
from pronghorn.credentials import SILENT, TLS_REFUSED, Credentials, reason
from pronghorn.errors import HandshakeRefused, InternalError, NodeLost, Overloaded
from pronghorn.ids import Fence
from pronghorn.tasks import Owner
from pronghorn.wire import SESSION_METHOD
from protos.node_pb2 import Hello

log = logging.getLogger(__name__)

CLOSE_S = 1.0
ENDED = "session_ended"
"""The code of the loss of a node that took its leave."""
PLAINTEXT = Credentials()
STREAM_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What grpc.aio raises when the stream is over: its status, or, of a write after that, a wrong state."""


class GrpcNodeClient:
    """Implements `ports.NodeClient`. Made inside a running event loop."""

    def __init__(
        self,
        record: NodeRecord,
        ours: Identity,
        connect_timeout_s: float,
        send_queue_frames: int,
        new_channel: Callable[[str], grpc.aio.Channel] = PLAINTEXT.channel,
    ) -> None:
        self._record = record
        self._ours = ours
        self._connect_timeout_s = connect_timeout_s
        self._send_queue_frames = send_queue_frames
        self._outbox: dict[int, tuple[bytes, Fence | None]] = {}  # by the order in which they were sent
        self._unsent: dict[Fence, int] = {}  # the Submits among them
        self._sent_frames = 0
        self._to_write = asyncio.Event()
        self._owner = Owner(f"session-{record.name}")
        self._channel = new_channel(record.address)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._up = False
        self._closed = False

    async def connect(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                session: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(SESSION_METHOD)
                self._call = session()
                await self._call.write(self._ours.to_hello().SerializeToString())
                theirs = await self._read()
        except TimeoutError as error:
            raise NodeLost(f"no Hello within {self._connect_timeout_s} s") from error
        except STREAM_ENDED as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise HandshakeRefused(f"{self._record.name} refused us: {error.details()}") from error
            if isinstance(error, grpc.aio.AioRpcError) and reason(error.details())[1] == TLS_REFUSED:
                raise HandshakeRefused(
                    f"{self._record.name}: {_reason(error)}", code=TLS_REFUSED, param="tls"
                ) from error
            raise _lost(error) from error
        self._check(theirs)
        self._up = True
        self._owner.start(self._write(), "writer")

    def _check(self, hello: bytes) -> None:
        try:
            theirs = Identity.from_hello(Hello.FromString(hello))
        except DecodeError as error:
            raise HandshakeRefused(
                f"{self._record.name} at {self._record.address} did not answer with a Hello"
            ) from error
        check_peer(self._ours, theirs, expect_incarnation=self._record.incarnation, compare_layout=False)
        if theirs.seed_digest != self._ours.seed_digest:
            raise HandshakeRefused(
                f"{theirs.role} {theirs.name}: seed_digest is {theirs.seed_digest!r} there and "
                f"{self._ours.seed_digest!r} here: another cluster's node",
                param="seed_digest",
            )

    def send(self, frame: OrchestratorFrame) -> None:
        if not self._up:
            raise NodeLost("the session is not up")
        if len(self._outbox) >= self._send_queue_frames and not isinstance(frame, Abort):
            raise Overloaded(f"{len(self._outbox)} frames wait for the socket of {self._record.name}")
        if isinstance(frame, Abort) and (waiting := self._unsent.pop(frame.fence, None)) is not None:
            del self._outbox[waiting]
            return
        self._sent_frames += 1
        fence = frame.fence if isinstance(frame, Submit) else None
        self._outbox[self._sent_frames] = encode(frame), fence
        if fence is not None:
            self._unsent[fence] = self._sent_frames
        self._to_write.set()

    async def frames(self) -> AsyncGenerator[NodeFrame, None]:
        while True:
            try:
                frame: NodeFrame = decode(await self._read(), NodeFrame)
            except STREAM_ENDED as error:
                self._up = False
                raise _lost(error) from error
            except InternalError as error:
                self._up = False
                raise NodeLost(f"it sent what is no frame: {error.message}", code="malformed") from error
            yield frame

    async def close(self) -> None:
        self._up, self._closed = False, True
        await self._owner.stop(CLOSE_S)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close(grace=None)

    async def _read(self) -> bytes:
        """The next message. Raises what grpc raises, or NodeLost where the node ended the stream in good order."""
        if self._call is None or self._closed:
            raise NodeLost("the session is not up")
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            # A call that `close` cancelled raises this in its reader too, which nobody has cancelled.
            if self._closed_under_the_reader():
                raise NodeLost("the session was closed", code=ENDED) from None
            raise
        if isinstance(message, bytes):
            return message
        self._up = False
        raise NodeLost("it ended the session", code=ENDED)

    def _closed_under_the_reader(self) -> bool:
        task = asyncio.current_task()
        return self._closed and task is not None and not task.cancelling()

    async def _write(self) -> None:
        assert self._call is not None
        try:
            while True:
                await self._to_write.wait()
                self._to_write.clear()
                while self._outbox:
                    await self._call.write(self._take())
        except STREAM_ENDED as error:
            # The reader sees the same end of the stream, and is the one that reports it.
            log.debug("writing to %s ended: %s", self._record.name, _reason(error))
            self._up = False

    def _take(self) -> bytes:
        number = next(iter(self._outbox))
        data, fence = self._outbox.pop(number)
        if fence is not None and self._unsent.get(fence) == number:
            del self._unsent[fence]
        return data


class GrpcConnector:
    """Implements `ports.NodeConnector`."""

    def __init__(
        self,
        ours: Identity,
        connect_timeout_s: float,
        send_queue_frames: int,
        new_channel: Callable[[str], grpc.aio.Channel] = PLAINTEXT.channel,
    ) -> None:
        self._ours = ours
        self._connect_timeout_s = connect_timeout_s
        self._send_queue_frames = send_queue_frames
        self._new_channel = new_channel

    def client(self, record: NodeRecord) -> GrpcNodeClient:
        return GrpcNodeClient(record, self._ours, self._connect_timeout_s, self._send_queue_frames, self._new_channel)


def _lost(error: BaseException) -> NodeLost:
    code = reason(error.details())[1] if isinstance(error, grpc.aio.AioRpcError) else None
    return NodeLost(_reason(error), code=SILENT if code == SILENT else None)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {reason(error.details())[0]}"
    return str(error) or type(error).__name__
