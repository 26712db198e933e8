"""What the process of an engine does: take its start from the shell, build, loop, say its last word.

Knows a socket, which it inherits, and the block memory's descriptor. Everything that it is told comes over the socket,
never in its arguments, which anybody on the host can read. It ends when the shell says so, when the socket ends, and on
Linux the moment that its parent dies, whatever it is computing.
"""

import ctypes
import logging
import selectors
import signal
import socket
import sys

import msgspec

from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.framing import FrameReader, pack
from pipelines.runtime.loop import BuildEngine, EngineLoop, InboxClosed
from pipelines.runtime.messages import EngineCommand, EngineFault, EngineMessage
from pipelines.types import wire
from pronghorn.clock import SystemClock
from pronghorn.errors import InternalError, PronghornError

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
COMMANDS_PER_ROUND = 256
"""However fast commands come, the loop gets to its step."""

_PR_SET_PDEATHSIG = 1


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """The first message on the socket."""

    config: EngineConfig
    seed: bytes
    block_bytes: int


class ShellLink:
    """The loop's inbox and outbox over the inherited socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._frames = FrameReader()
        self._unread: list[bytes] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def take_start(self) -> StartEngine:
        while not self._unread:
            self._receive()
        return wire.decode(self._unread.pop(0), StartEngine)

    def take(self, timeout_s: float) -> list[EngineCommand]:
        while len(self._unread) < COMMANDS_PER_ROUND and self._selector.select(0.0 if self._unread else timeout_s):
            self._receive()
        frames, self._unread = self._unread, []
        return [wire.decode(frame, EngineCommand) for frame in frames]

    def put(self, message: EngineMessage) -> None:
        try:
            self._control.sendall(pack(message))
        except OSError as error:
            raise InboxClosed from error

    def _receive(self) -> None:
        try:
            data = self._control.recv(RECEIVE_BYTES)
        except OSError as error:
            raise InboxClosed from error
        if not data:
            raise InboxClosed
        self._unread += self._frames.feed(data)


def serve(build: BuildEngine) -> int:
    """The whole life of an engine process; its exit code. `sys.argv` holds the two inherited descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the shell decides
    _die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    control_fd, memory_fd = (int(argument) for argument in sys.argv[1:3])
    link = ShellLink(socket.socket(fileno=control_fd))
    try:
        _run(build, link, memory_fd)
    except InboxClosed:
        return 0
    except PronghornError as error:
        return _last_word(link, error)
    except Exception as error:  # the process's outermost edge: said to the shell, and the process ends
        log.exception("the engine failed")
        return _last_word(link, InternalError(f"{type(error).__name__}: {error}"))
    return 0


def _run(build: BuildEngine, link: ShellLink, memory_fd: int) -> None:
    start = link.take_start()
    memory = BlockMemory.attach(memory_fd, start.config.total_blocks, start.block_bytes)
    parts = build(start.config, start.seed, memory)
    link.put(parts.ready)
    period_s = start.config.report_period_s
    EngineLoop(parts.scheduler, parts.pipeline, memory, link, link, SystemClock(), period_s).run()


def _last_word(link: ShellLink, error: PronghornError) -> int:
    try:
        link.put(EngineFault(error.record()))
    except InboxClosed:
        log.error("nobody is left to hear of: %s", error)
    return 1


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Elsewhere the socket's end must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
