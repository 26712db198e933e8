"""Server streams from other nodes over gRPC: a channel or a few for each life of a node, kept while they are used.

Knows channels, one method and status codes; not what the frames are. A channel that broke takes no new call and is
closed with its last one; a channel that nobody has used for a while is closed by `close_idle`. So a node that leaves
costs nothing here.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from kvcache import transfer
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import Clock
from pronghorn.credentials import TLS_REFUSED, Credentials, reason
from pronghorn.errors import DeadlineExceeded, HandshakeRefused, NodeLost, NodeRefused, PronghornError
from pronghorn.ids import Incarnation

log = logging.getLogger(__name__)

Call = aio.UnaryStreamCall[Any, Any]


IDLE_CHANNEL_S = 60.0
"""A channel is closed when it has carried nothing for this long."""


_Key = tuple[str, Incarnation, int]
"""Address, life, and which of the connections to it."""


class _Channel:
    def __init__(self, channel: aio.Channel, version: object) -> None:
        self.channel = channel
        self.version = version
        """Of the credentials with which it was made."""
        self.users = 0
        self.broken = False
        self.used_at_s = 0.0


class _Stream:
    def __init__(self, call: Call, target: PrefillTarget) -> None:
        self._call = call
        self._target = target
        self.broke = False

    async def read(self) -> transfer.Frame | None:
        try:
            data = await self._call.read()
        except aio.AioRpcError as error:
            self.broke = True
            raise _translate(error, self._target) from error
        return transfer.decode(data) if isinstance(data, bytes) else None

    def take(self, frame: transfer.BlocksFrame, receiver: transfer.BlockReceiver) -> None:
        receiver.accept(frame)


def _translate(error: aio.AioRpcError, target: PrefillTarget) -> PronghornError:
    why, code = reason(error.details())
    said = f"{target.name} at {target.address}: {error.code().name}: {why}"
    if code == TLS_REFUSED:
        return HandshakeRefused(said, code=code, param="tls")
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the request's deadline passed in a stream from {said}")
        case grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return NodeRefused(said)
        case _:
            return NodeLost(said, code=code)


class StreamClient:
    def __init__(
        self,
        method: str,
        clock: Clock,
        idle_channel_s: float,
        new_channel: Callable[[str], aio.Channel] | None = None,
        credentials: Credentials | None = None,
        connections: int = 1,
    ) -> None:
        """Without `new_channel`, channels are made with `credentials`, and anew when those have changed. Streams share
        `connections` to each peer."""
        self._connections = connections
        self._method = method
        self._clock = clock
        self._credentials = credentials or Credentials()
        self._new_channel = new_channel or self._credentials.channel
        self._idle_channel_s = idle_channel_s
        self._channels: dict[_Key, _Channel] = {}

    @property
    def open_channels(self) -> int:
        return len(self._channels)

    def channels(self) -> list[str]:
        return [address for address, _, _ in self._channels]

    @asynccontextmanager
    async def stream(self, target: PrefillTarget, request: bytes, timeout_s: float) -> AsyncIterator[_Stream]:
        """Open a stream with `target`; leaving the context cancels it on both sides."""
        key = self._least_used(target)
        version = self._credentials.version()
        entry = self._channels.get(key)
        if entry is not None and entry.version != version:
            await self._retire(key, entry)
            entry = self._channels.get(key)
        if entry is None:
            entry = self._channels[key] = _Channel(self._new_channel(target.address), version)
        method: aio.UnaryStreamMultiCallable[Any, Any] = entry.channel.unary_stream(self._method)
        call: Call = method(request, timeout=timeout_s)
        stream = _Stream(call, target)
        entry.users += 1
        try:
            yield stream
        finally:
            call.cancel()
            entry.users -= 1
            entry.used_at_s = self._clock.now_s()
            entry.broken = entry.broken or stream.broke
            if entry.broken and self._channels.get(key) is entry:
                del self._channels[key]
            if entry.broken and entry.users == 0:
                await entry.channel.close()

    def _least_used(self, target: PrefillTarget) -> _Key:
        """Of the peer's connections; one that is open before one that is not."""
        keys = [(target.address, target.incarnation, number) for number in range(self._connections)]
        found = {key: self._channels.get(key) for key in keys}
        return min(keys, key=lambda key: (0, True) if (entry := found[key]) is None else (entry.users, False))

    async def _retire(self, key: _Key, entry: _Channel) -> None:
        """It takes no new call, and closes with its last one."""
        entry.broken = True
        del self._channels[key]
        if entry.users == 0:
            await entry.channel.close()

    async def close_idle(self) -> None:
        now_s = self._clock.now_s()
        idle = [
            key
            for key, entry in self._channels.items()
            if entry.users == 0 and now_s - entry.used_at_s >= self._idle_channel_s
        ]
        for entry in [self._channels.pop(key) for key in idle]:
            await entry.channel.close()

    async def close(self) -> None:
        """Close every channel; the streams on them break."""
        entries = list(self._channels.values())
        self._channels.clear()
        for entry in entries:
            await entry.channel.close()
