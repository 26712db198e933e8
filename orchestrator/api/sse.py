"""A response of server-sent events whose status line waits for the first event, for one heartbeat at most.

What fails before the first byte is an ordinary HTTP error. The first byte leaves with the first event, or where a long
prefill keeps that back, one heartbeat after the start, as a comment: proxies cut connections on which nothing comes.
From then on an error is one last event and the stream closes without its usual last word, `[DONE]` of a stream of
chunks, which a stream that went well says exactly once. A silent stream carries comments. When the client leaves, the
source of the events is closed at once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.api.chunks import PING, Chunks
from orchestrator.api.endings import ClientGone, before, while_client_stays
from orchestrator.api.errors import UNFORESEEN
from pronghorn.clock import Clock
from pronghorn.deadline import Deadline
from pronghorn.errors import PronghornError
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Sends `events` (whole events as bytes, b"" for none yet) and ends them with the request and the last word of
    `chunks`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        chunks: Chunks,
        *,
        name: str,
        deadline: Deadline,
        clock: Clock,
        owner: Owner,
        heartbeat_s: float,
        last_word_s: float,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._chunks = chunks
        self._name = name
        self._deadline = deadline
        self._clock = clock
        self._owner = owner
        self._heartbeat_s = heartbeat_s
        self._last_word_s = last_word_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = _EventLine(send, self.raw_headers, self._clock, self._heartbeat_s)
        try:
            async with while_client_stays(receive, self._owner, self._name):
                last = await self._send_events(line)
                async with asyncio.timeout(self._last_word_s):
                    await line.end(last)
        except (ClientGone, TimeoutError) as gone:
            if not line.started:
                raise
            log.info("stream %s ended early: %s", self._name, gone or "the client does not read")

    async def _send_events(self, line: "_EventLine") -> bytes:
        """Returns what is to be said last."""
        heartbeat = self._owner.start(line.keep_warm(), f"heartbeat of {self._name}")
        try:
            async with before(self._deadline, self._clock), aclosing(self._events) as events:
                async for event in events:
                    if event:
                        await line.write(event)
            return self._chunks.last
        except PronghornError as error:
            if not line.started or isinstance(error, ClientGone):
                raise
            log.warning("stream %s failed: %s", self._name, error.message)
            return self._chunks.failure(error)
        except Exception:  # the edge: the status line is out, so only this response can tell the client
            if not line.started:
                raise
            log.exception("stream %s failed", self._name)
            return self._chunks.failure(UNFORESEEN)
        finally:
            heartbeat.cancel()


class _EventLine:
    """The way to the client: headers before the first byte, one write at a time."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], clock: Clock, heartbeat_s: float) -> None:
        self._send = send
        self._headers = headers
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._written_at_s = clock.now_s()
        self._writing = asyncio.Lock()
        self.started = False

    async def write(self, event: bytes, more: bool = True) -> None:
        """Raises ClientGone."""
        async with self._writing:
            try:
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                await self._send({"type": "http.response.body", "body": event, "more_body": more})
            except OSError as error:
                raise ClientGone() from error
            self._written_at_s = self._clock.now_s()

    async def end(self, last: bytes) -> None:
        await self.write(last, more=False)

    async def keep_warm(self) -> None:
        """Send a comment whenever nothing was written for a heartbeat. Runs until it is cancelled."""
        while True:
            quiet_s = self._clock.now_s() - self._written_at_s
            if quiet_s >= self._heartbeat_s:
                try:
                    await self.write(PING)
                except ClientGone:
                    return  # the stream itself notices
            else:
                await asyncio.sleep(self._heartbeat_s - quiet_s)
