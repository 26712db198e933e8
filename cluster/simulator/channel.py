"""grpc.aio as far as nodes and orchestrators use it, over simulated streams: channels, calls, a server, its context.

Only here does the simulator name grpc: the clients and services under test raise and catch its exceptions. Knows what
grpc.aio does at the end of a call: a broken or cancelled call cancels its handler; the reader of a call that is
cancelled gets CancelledError; any other end is an AioRpcError with its status.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc import aio

from cluster.simulator.network import Network
from cluster.simulator.process import SimProcess
from cluster.simulator.stream import OK, End, Open, Status, Stream

NO_METADATA = aio.Metadata()


class Directory:
    """Which server listens where."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._servers: dict[str, SimServer] = {}
        self._next_port = 1000

    def listen(self, server: "SimServer", host: str) -> int:
        self._next_port += 1
        self._servers[f"{host}:{self._next_port}"] = server
        return self._next_port

    def close(self, server: "SimServer") -> None:
        for address in [a for a, held in self._servers.items() if held is server]:
            del self._servers[address]

    def find(self, address: str) -> "SimServer | None":
        server = self._servers.get(address)
        return server if server is not None and server.process.alive else None

    def listens(self, server: "SimServer") -> bool:
        return server in self._servers.values()

    def new_server(self, process: SimProcess, host: str) -> Callable[[], aio.Server]:
        return lambda: cast(aio.Server, SimServer(self, process, host))

    def new_channel(self, process: SimProcess, host: str) -> Callable[[str], aio.Channel]:
        return lambda address: cast(aio.Channel, SimChannel(self, process, host, address))


# --- the client's side ------------------------------------------------------------------------------------------------


class SimChannel:
    def __init__(self, directory: Directory, process: SimProcess, host: str, address: str) -> None:
        self._directory = directory
        self._process = process
        self._host = host
        self._address = address
        self._calls: list[SimCall] = []

    def stream_stream(self, method: str) -> Callable[[], "SimCall"]:
        return lambda: self._call(method, None, None)

    def unary_stream(self, method: str) -> Callable[..., "SimCall"]:
        return lambda request, timeout: self._call(method, request, timeout)

    def _call(self, method: str, request: bytes | None, timeout_s: float | None) -> "SimCall":
        end = End(self._process, self._host)
        server = self._directory.find(self._address)
        if server is None:
            self._directory.network.refuse(end)
            call = SimCall(end, None, timeout_s)
        else:
            call = SimCall(end, server.accept(end, method, request, timeout_s), timeout_s)
        self._calls.append(call)
        return call

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()


class SimCall:
    def __init__(self, end: End, stream: Stream | None, timeout_s: float | None) -> None:
        self._end = end
        self._stream = stream
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire)

    async def write(self, data: bytes) -> None:
        if self._end.status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._stream is not None:
            await self._end.write(data)

    async def read(self) -> object:
        data = await self._end.read()
        if data is not None:
            return data
        status = self._end.status
        assert status is not None
        if status == OK:
            return aio.EOF
        raise aio.AioRpcError(grpc.StatusCode[status.code], NO_METADATA, NO_METADATA, details=status.details)

    def cancel(self) -> bool:
        return self._stop(Status("CANCELLED", "Locally cancelled by application!"))

    def _expire(self) -> None:
        self._stop(Status("DEADLINE_EXCEEDED", "Deadline Exceeded"))

    def _stop(self, status: Status) -> bool:
        if self._end.status is not None:
            return False
        if self._stream is not None:
            self._stream.up.send(status)
        if status.code == "CANCELLED":
            self._end.cancel_reader()
        self._end.end(status)
        return True


# --- the server's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: tuple[()] = ()


class _Aborted(Exception):
    pass


class SimContext:
    """`aio.ServicerContext` of one call."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.status = OK

    async def read(self) -> object:
        data = await self._end.read()
        return aio.EOF if data is None else data

    async def write(self, data: bytes) -> None:
        await self._end.write(data)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = Status(code.name, details)
        raise _Aborted(details)


class SimServer:
    def __init__(self, directory: Directory, process: SimProcess, host: str) -> None:
        self.process = process
        self._directory = directory
        self._host = host
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._running: dict[asyncio.Task[Any], None] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        return self._directory.listen(self, self._host)

    async def start(self) -> None:
        """It listens since its port was bound."""

    async def stop(self, grace: float | None) -> None:
        self._directory.close(self)
        if self._running and grace:
            await asyncio.wait(list(self._running), timeout=grace)
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def accept(self, client: End, method: str, request: bytes | None, timeout_s: float | None) -> Stream:
        end = End(self.process, self._host)
        holder: list[Stream] = []
        end.on_open = lambda call: self._serve(holder[0], call, timeout_s)
        holder.append(self._directory.network.open(client, end, method, request))
        return holder[0]

    def _serve(self, stream: Stream, call: Open, timeout_s: float | None) -> None:
        """As this server's process."""
        end = stream.server
        details = cast(grpc.HandlerCallDetails, _Details(call.method))
        found = [h for h in (handlers.service(details) for handlers in self._handlers) if h is not None]
        if not found or not self._directory.listens(self):
            stream.down.send(Status("UNIMPLEMENTED" if not found else "UNAVAILABLE", "Method not found!"))
            end.end(OK)
            return
        task = self.process.start(self._run(found[0], stream, call), f"call-{call.method}")
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))
        end.on_over = task.cancel  # type: ignore[assignment]  # what it returns is of no interest
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, end.end, Status("DEADLINE_EXCEEDED"))
        self._directory.network.opened(stream)

    async def _run(self, handler: Any, stream: Stream, call: Open) -> None:
        context = SimContext(stream.server)
        try:
            if call.request is None:
                await handler.stream_stream(None, context)
            else:
                await handler.unary_stream(call.request, context)
            status = context.status
        except _Aborted:
            status = context.status
        except asyncio.CancelledError:
            self._end(stream, Status("CANCELLED", "the handler was cancelled"))
            raise
        except Exception as error:
            self._end(stream, Status("UNKNOWN", f"Unexpected {error!r}"))
            raise
        self._end(stream, status)

    @staticmethod
    def _end(stream: Stream, status: Status) -> None:
        stream.server.on_over = None
        stream.down.send(status)
        stream.server.end(status)
