"""The far end of a session over a real gRPC server on loopback: says Hello, takes frames, says what a test tells it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec

from kvcache.handshake import Identity
from kvcache.registry import NodeRecord
from pipelines.types.frames import Heartbeat, NodeFrame, OrchestratorFrame
from pipelines.types.wire import decode, encode
from pronghorn.wire import SERVER_CHANNEL_OPTIONS, SESSION_METHOD
from tests.fakes.memory_node import report

Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcNode:
    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.hello: bytes = self.identity().to_hello().SerializeToString()
        """What it answers a Hello with."""
        self.refuses: str | None = None
        """What it says instead, ending the stream."""
        self.silent = False
        """Whether it keeps its Hello to itself."""
        self.reading = True
        self.received: asyncio.Queue[OrchestratorFrame] = asyncio.Queue()
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    def identity(self, **changes: Any) -> Identity:
        ours = Identity(
            role=self.record.role,
            name=self.record.name,
            incarnation=self.record.incarnation,
            model=self.record.model,
            seed_digest=self.record.seed_digest,
        )
        return msgspec.structs.replace(ours, **changes)

    def say(self, frame: NodeFrame) -> None:
        self._said.put_nowait(encode(frame))

    def say_garbage(self) -> None:
        self._said.put_nowait(b"\xc1 no msgpack")

    def end(self) -> None:
        """End the stream in good order."""
        self._said.put_nowait(None)

    async def kill(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def session(self, _: Any, context: Context) -> None:
        await context.read()
        if self.refuses is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses)
        if self.silent:
            await asyncio.Event().wait()
        await context.write(self.hello)
        await context.write(encode(Heartbeat(report(self.record))))
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(context))
            while (said := await self._said.get()) is not None:
                await context.write(said)
            reader.cancel()

    async def _read(self, context: Context) -> None:
        if not self.reading:
            await asyncio.Event().wait()
        while isinstance(data := await context.read(), bytes):
            self.received.put_nowait(decode(data, OrchestratorFrame))

    async def start(self) -> int:
        """Serve on a loopback port of the system's choosing, which the record names from now on."""
        _, service, method = SESSION_METHOD.split("/")
        self._server = grpc.aio.server(options=SERVER_CHANNEL_OPTIONS)
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self.session)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.record = msgspec.structs.replace(self.record, address=f"127.0.0.1:{port}")
        return port


@asynccontextmanager
async def serving(record: NodeRecord) -> AsyncIterator[GrpcNode]:
    node = GrpcNode(record)
    await node.start()
    try:
        yield node
    finally:
        await node.kill()
