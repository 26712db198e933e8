"""The engine as a child process of its node: what serves.

Knows a process, a socket pair and the block memory's descriptor; not what the engine computes. Lives on one asyncio
loop, and must be started from the thread of that loop: on Linux the kernel kills the child when that thread ends.
Invariants: nothing here blocks the loop; the end of the socket is the end of the engine, and is reported with the exit
code once the process is reaped; whatever happens, `stop` leaves no process and no descriptor.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections import deque

from kvcache.memory import BlockMemory
from pipelines.runtime.child import RECEIVE_BYTES, StartEngine
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.framing import FrameReader, pack
from pipelines.runtime.messages import (
    FREES,
    EngineCommand,
    EngineFault,
    EngineMessage,
    EngineReady,
    StepReport,
    Stop,
)
from pipelines.runtime.output_lines import OutputLines
from pipelines.runtime.reports import Reports
from pipelines.types import wire
from pronghorn.errors import EngineDied, ErrorRecord, InternalError, Overloaded, PronghornError, from_record
from pronghorn.tasks import Owner

log = logging.getLogger(__name__)

REAP_TIMEOUT_S = 5.0
"""For the kernel to take down a process whose socket has ended, or that was killed."""

ASKED, TERMINATED = 0.5, 0.25
"""Shares of the grace that `stop` waits after `Stop` and after SIGTERM; then comes SIGKILL."""


class ProcessEngine:
    def __init__(
        self,
        entry: str,
        config: EngineConfig,
        seed: bytes,
        memory: BlockMemory,
        *,
        name: str = "engine",
        start_timeout_s: float = 180.0,
    ) -> None:
        """`entry` is a module whose main calls `child.serve`. Takes `memory` over: `stop` closes it."""
        self.memory = memory
        self._entry = entry
        self._config = config
        self._seed = seed
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._owner = Owner(f"engine-of-{name}")
        self._frames = FrameReader()
        self._outgoing: deque[bytes] = deque()
        self._sent_bytes = 0
        """Of the first frame of `_outgoing`."""
        self._reports = Reports(name, config.stall_timeout_s, on_room=self._resume_reading)
        self._reading = False
        self._heard_end = False
        self._stopping = False
        self._closed = False
        self._fault: ErrorRecord | None = None
        self._gone = asyncio.Event()
        self._stop_lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    # --- the port ----------------------------------------------------------------------------------------------------

    async def start(self) -> EngineReady:
        assert self._process is None, "an engine is started once"
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._spawn()
        self._resume_reading()
        self._queue(pack(StartEngine(self._config, self._seed, self.memory.block_bytes)))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await self._ready
        except TimeoutError:
            raise EngineDied(
                f"the engine of {self._name} did not start within {self._start_timeout_s} s{self._output.tail()}"
            ) from None
        finally:
            if not self._ready.done() or self._ready.cancelled() or self._ready.exception() is not None:
                await self.stop(0.0)

    def send(self, command: EngineCommand) -> None:
        if (death := self._reports.ended) is not None:
            raise EngineDied(death.message)
        if len(self._outgoing) >= self._config.max_waiting and not isinstance(command, FREES):
            raise Overloaded(f"{len(self._outgoing)} commands wait for the engine of {self._name} already")
        self._reports.note_command()
        self._queue(pack(command))

    async def receive(self) -> StepReport:
        return await self._reports.next()

    async def stop(self, grace_s: float) -> None:
        async with self._stop_lock:
            if self._closed:
                return
            self._stopping = True
            if self._process is not None:
                await self._end_process(self._process, grace_s)
                self._close()
            self._closed = True
            self._reports.end(EngineDied(f"the engine of {self._name} was stopped"))
            self.memory.close()
            await self._owner.stop(REAP_TIMEOUT_S)

    @property
    def pid(self) -> int | None:
        """The engine process's id, for logs and for `status`; None before the start."""
        return None if self._process is None else self._process.pid

    # --- the process -------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        fds = (theirs.fileno(), self.memory.fd)
        command = [sys.executable, "-u", "-X", "faulthandler", "-m", self._entry, *map(str, fds)]
        with theirs:
            # A session of its own: a terminal's Ctrl-C is for whoever owns the engine and drains it, and Linux shares
            # processors out by session first, so that what else runs in ours does not slow the engine's threads.
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output_fd = self._process.stdout.fileno()
        self._output = OutputLines(self._output_fd, self._name)
        self._loop.add_reader(self._output_fd, self._on_output)

    def _on_output(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._output_fd)

    async def _end_process(self, process: subprocess.Popen[bytes], grace_s: float) -> None:
        self._resume_reading()  # an engine that waits for room to report could not hear us
        if not self._gone.is_set() and grace_s > 0.0:
            self._queue(pack(Stop()))
            if not await self._gone_within(grace_s * ASKED):
                process.terminate()
                await self._gone_within(grace_s * TERMINATED)
        if not self._gone.is_set():
            process.kill()
            if not await self._gone_within(2 * REAP_TIMEOUT_S):
                log.error("the engine of %s (pid %d) cannot be killed", self._name, process.pid)

    async def _gone_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        except TimeoutError:
            return False
        return True

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """The socket has ended: so has the process, or it will be made to."""
        try:
            code = await asyncio.to_thread(process.wait, REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        self._output.drain()
        self._finish(self._obituary(code))
        self._gone.set()

    def _obituary(self, code: int) -> EngineDied:
        how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
        why = "" if self._fault is None else f": {self._fault.message}"
        return EngineDied(f"the engine of {self._name} ended {how}{why}")

    def _finish(self, death: EngineDied) -> None:
        """Its last printed lines are for operators: in the log, and in the error of a start, which no client sees."""
        self._reports.end(death)
        if not self._stopping:
            log.error("%s%s", death.message, self._output.tail())
        if not self._ready.done():
            quoted = EngineDied(death.message + self._output.tail())
            error: PronghornError = quoted if self._fault is None else from_record(self._fault)
            self._ready.set_exception(error)

    def _close(self) -> None:
        self._heard_end = True
        assert self._process is not None and self._process.stdout is not None
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._loop.remove_reader(self._output_fd)
        self._socket.close()
        self._process.stdout.close()

    # --- the socket --------------------------------------------------------------------------------------------------

    def _resume_reading(self) -> None:
        if not self._reading and not self._heard_end:
            self._reading = True
            self._loop.add_reader(self._socket, self._on_readable)

    def _pause_reading(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._socket)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset: what an end looks like with our commands unread
            data = b""
        assert self._process is not None
        if not data:
            self._heard_end = True
            self._pause_reading()
            self._owner.start(self._reap(self._process), "reap")
            return
        try:
            for frame in self._frames.feed(data):
                self._on_message(wire.decode(frame, EngineMessage))
        except InternalError as error:  # not an engine's words: nothing that follows can be trusted
            self._fault = error.record()
            self._process.kill()
        if self._reports.full and not self._stopping:
            self._pause_reading()

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)
            case StepReport():
                if not self._stopping:
                    self._reports.push(message)
            case EngineFault():
                self._fault = message.error

    def _queue(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        if len(self._outgoing) == 1:
            self._on_writable()

    def _on_writable(self) -> None:
        """Send what the socket takes; the rest when it has room again."""
        while self._outgoing:
            try:
                self._sent_bytes += self._socket.send(memoryview(self._outgoing[0])[self._sent_bytes :])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._on_writable)
                return
            except OSError:  # the engine has ended: the reader hears of it
                self._outgoing.clear()
                break
            if self._sent_bytes == len(self._outgoing[0]):
                self._outgoing.popleft()
                self._sent_bytes = 0
        self._loop.remove_writer(self._socket)
