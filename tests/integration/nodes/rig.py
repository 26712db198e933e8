"""Real nodes on loopback, with canary engines in threads, and an orchestrator's end of a session.

Whatever a test asks of a `Rig` is ended with it; `at_rest` is how a test sees that nothing is left behind.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from grpc import aio

from decode_nodes.config import DecodeNodeConfig
from decode_nodes.node import DecodeNode
from decode_nodes.scheduler import DecodeScheduler
from kvcache.directory import BlockDirectory
from kvcache.handshake import Identity
from kvcache.hashing import seed_digest
from kvcache.memory import BlockMemory
from kvcache.memory_registry import MemoryRegistry
from kvcache.registry import NodeRegistry
from pipelines.node.config import NodeConfig
from pipelines.node.peer_streams import streams_from_nodes
from pipelines.node.shell import NodeState
from pipelines.node.stream_client import IDLE_CHANNEL_S
from pipelines.node.stream_service import stream_handler
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.port import EnginePort
from pipelines.runtime.process import ProcessEngine
from pipelines.runtime.replicated_pipeline import ReplicatedPipeline
from pipelines.runtime.thread import ThreadEngine
from pipelines.types import wire
from pipelines.types.frames import (
    Abort,
    BlockEvents,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Delta,
    Failure,
    Heartbeat,
    NodeFrame,
    NodeReport,
    Outputs,
    PrefillTarget,
    Submit,
)
from pipelines.types.status import GenerationStatus
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.node import PrefillNode
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.credentials import Credentials, TlsFiles
from pronghorn.ids import Fence, Incarnation, NodeName, new_incarnation
from pronghorn.tasks import Owner
from pronghorn.wire import (
    FETCH_METHOD,
    PREFILL_METHOD,
    SERVER_CHANNEL_OPTIONS,
    SESSION_METHOD,
    STATUS_METHOD,
)
from protos import node_pb2
from tests.fakes.canary_engine import SEED, build_canary_engine, canary_config, canary_context, canary_memory
from tests.fakes.canary_pipeline import VOCAB_SIZE, CanaryPipeline

BLOCK_TOKENS = 4
MODEL = "canary"
PATIENCE_S = 60.0
"""Bound on everything that a test waits for; nothing comes near it unless the test fails."""

UNREADY_AFTER_S = 0.4

Node = PrefillNode | DecodeNode
Frames = Callable[[bytes], AsyncGenerator[bytes, None]]


def prompt(blocks: int, more_tokens: int = 1, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB_SIZE for i in range(blocks * BLOCK_TOKENS + more_tokens)]


class ClosingGate(threading.Event):
    """Lets so many steps through, and holds the engine in the next one until it is set."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.set()
        self._steps_left = steps

    def wait(self, timeout: float | None = None) -> bool:
        if self._steps_left == 0:
            self.clear()
        self._steps_left -= 1
        return super().wait(timeout)


class CanaryEngine:
    """A ThreadEngine with a canary, whose pipeline the test can hold and break."""

    def __init__(self, config: EngineConfig, scheduler: type[PrefillScheduler] | type[DecodeScheduler]) -> None:
        self._scheduler = scheduler
        self._parts: EngineParts
        self.port = ThreadEngine(self._build, config, SEED, canary_memory(config))

    def _build(self, config: EngineConfig, seed: bytes, memory: BlockMemory) -> EngineParts:
        self._parts = build_canary_engine(config, seed, memory, self._scheduler)
        return self._parts

    @property
    def pipelines(self) -> list[CanaryPipeline]:
        """One a replica."""
        built = self._parts.pipeline
        pipelines = built.replicas if isinstance(built, ReplicatedPipeline) else [built]
        return [pipeline for pipeline in pipelines if isinstance(pipeline, CanaryPipeline)]

    @property
    def pipeline(self) -> CanaryPipeline:
        (pipeline,) = self.pipelines
        return pipeline

    def hold_after(self, steps: int) -> None:
        """Let so many more steps of the sole replica through: what it generates cannot end before it is looked at."""
        self.pipeline.gate = ClosingGate(steps)

    async def is_held(self) -> None:
        """Wait until the engine is inside the step that `hold_after` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while self.pipeline.gate.is_set():  # noqa: ASYNC110  # closed in the engine's thread, which no event reaches
                await asyncio.sleep(0.005)

    def close_gates(self) -> None:
        for pipeline in self.pipelines:
            pipeline.gate.clear()

    def open_gates(self) -> None:
        for pipeline in self.pipelines:
            pipeline.gate.set()


class Orchestrator:
    """An orchestrator's end of one session."""

    def __init__(self, call: Any, hello: Identity) -> None:
        self.node = hello
        self.beats: list[NodeReport] = []
        self.frames: list[Outputs] = []
        self.deltas: dict[Fence, list[Delta]] = {}
        self.failures: dict[Fence, Failure] = {}
        self.blocks: list[BlockEvents] = []
        self.ended = False
        self._call = call
        self._changed = asyncio.Condition()
        self._attempts = 0

    async def read(self) -> None:
        while isinstance(data := await self._call.read(), bytes):
            frame: NodeFrame = wire.decode(data, NodeFrame)
            async with self._changed:
                self._take(frame)
                self._changed.notify_all()
        self.ended = True

    def _take(self, frame: NodeFrame) -> None:
        match frame:
            case Heartbeat(report=report):
                self.beats.append(report)
            case BlockEvents():
                self.blocks.append(frame)
            case Outputs(deltas=deltas, failures=failures):
                self.frames.append(frame)
                for delta in deltas:
                    self.deltas.setdefault(delta.fence, []).append(delta)
                for failure in failures:
                    assert failure.fence not in self.failures, f"two last words for {failure.fence}"
                    self.failures[failure.fence] = failure

    async def send(self, frame: object) -> None:
        await self._call.write(frame if isinstance(frame, bytes) else wire.encode(frame))

    async def submit(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        *prefill: PrefillTarget,
        budget_s: float = 30.0,
        salt: str | None = None,
        hint: dict[str, Any] | None = None,
        **more: Any,
    ) -> Fence:
        self._attempts += 1
        context = canary_context(tokens, new_tokens, salt=salt)
        context.external_block_metadata = hint
        fence = Fence(context.request_id, self._attempts, Incarnation(self.node.incarnation))
        await self.send(Submit(fence, context, budget_s, list(prefill), **more))
        return fence

    async def abort(self, fence: Fence) -> None:
        await self.send(Abort(fence))

    def tokens(self, fence: Fence) -> list[int]:
        return [token for delta in self.deltas.get(fence, []) for token in delta.tokens]

    def is_done(self, fence: Fence) -> bool:
        deltas = self.deltas.get(fence, [])
        return fence in self.failures or (bool(deltas) and deltas[-1].status is not GenerationStatus.ACTIVE)

    def cached_keys(self) -> set[bytes]:
        """What the node's block events come to."""
        keys: set[bytes] = set()
        for frame in self.blocks:
            keys = set() if frame.snapshot else keys
            for event in frame.events:
                match event:
                    case BlocksStored():
                        keys |= _split(event.keys)
                    case BlocksRemoved():
                        keys -= _split(event.keys)
                    case BlocksCleared():
                        keys = set()
        return keys

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    async def result(self, fence: Fence) -> list[int]:
        """The whole answer; AssertionError where the attempt failed."""
        await self.until(lambda: self.is_done(fence))
        assert fence not in self.failures, self.failures[fence].error
        return self.tokens(fence)

    async def failure(self, fence: Fence) -> Failure:
        await self.until(lambda: self.is_done(fence))
        return self.failures[fence]

    async def close(self) -> None:
        await self._call.done_writing()

    def die(self) -> None:
        self._call.cancel()


def _split(keys: bytes) -> set[bytes]:
    return {keys[i : i + 8] for i in range(0, len(keys), 8)}


def orchestrator_identity(**changes: Any) -> Identity:
    identity = Identity(
        role="orchestrator",
        name="orchestrator-1",
        incarnation=new_incarnation(),
        model=MODEL,
        seed_digest=seed_digest(SEED),
    )
    return msgspec.structs.replace(identity, **changes)


class Rig:
    def __init__(self, stack: AsyncExitStack) -> None:
        self.clock = SystemClock()
        self.registry: NodeRegistry = MemoryRegistry(self.clock)
        self.lease_s = 0.3
        self.directory: BlockDirectory | None = None
        """Of every node that is made from then on."""
        self.prefill_nodes: list[PrefillNode] = []
        self.engines: dict[str, CanaryEngine] = {}
        self.shared_memory = False
        self.tls: TlsFiles | None = None
        """As the nodes made from now on are configured."""
        self._stack = stack
        self._owner = Owner("rig")
        stack.push_async_callback(self._owner.stop, 1.0)

    def node_config(self, port: int = 0, **engine: Any) -> NodeConfig:
        max_in_flight = engine.pop("max_in_flight", 1024)
        tiers: dict[str, Any] = engine.pop("tiers", {})
        return NodeConfig(
            **tiers,
            max_in_flight=max_in_flight,
            engine=canary_config(**({"max_batch_input_tokens": 2 * BLOCK_TOKENS} | engine)),
            redis_url="",
            key_prefix="",
            lease_s=self.lease_s,
            port=port,
            shared_memory=self.shared_memory,
            tls=self.tls,
            drain_timeout_s=30.0,
            stop_grace_s=1.0,
            unready_after_s=UNREADY_AFTER_S,
        )

    async def prefill(
        self, name: str = "prefill-1", *, seed: bytes = SEED, **engine: Any
    ) -> tuple[PrefillNode, CanaryEngine]:
        canary = CanaryEngine(self.node_config(**engine).engine, PrefillScheduler)
        self.engines[name] = canary
        node = await self.prefill_over(canary.port, name, seed, **engine)
        self._stack.callback(canary.open_gates)  # a held engine could not stop
        return node, canary

    async def decode(
        self, name: str = "decode-1", *, seed: bytes = SEED, stall_timeout_s: float = 30.0, **engine: Any
    ) -> tuple[DecodeNode, CanaryEngine]:
        canary = CanaryEngine(self.node_config(**engine).engine, DecodeScheduler)
        self.engines[name] = canary
        node = await self.decode_over(canary.port, name, seed, stall_timeout_s, **engine)
        self._stack.callback(canary.open_gates)  # a held engine could not stop
        return node, canary

    async def prefill_over(
        self, engine: EnginePort, name: str = "prefill-1", seed: bytes = SEED, **changes: Any
    ) -> PrefillNode:
        config = PrefillNodeConfig(node=self.node_config(**changes), progress_period_s=0.05, linger_s=0.1)
        counters = Counters()
        node = PrefillNode(
            name=NodeName(name),
            config=config,
            hash_seed=seed,
            counters=counters,
            fetch=streams_from_nodes(FETCH_METHOD, config.node, self.clock, IDLE_CHANNEL_S, counters),
            directory=self.directory,
            engine=engine,
            registry=self.registry,
            clock=self.clock,
        )
        await node.start()
        self.prefill_nodes.append(node)
        self._stack.push_async_callback(node.shell.stop)
        return node

    async def decode_over(
        self,
        engine: EnginePort,
        name: str = "decode-1",
        seed: bytes = SEED,
        stall_timeout_s: float = 30.0,
        **changes: Any,
    ) -> DecodeNode:
        config = DecodeNodeConfig(node=self.node_config(**changes), stall_timeout_s=stall_timeout_s)
        counters = Counters()
        node = DecodeNode(
            name=NodeName(name),
            config=config,
            hash_seed=seed,
            counters=counters,
            fetch=streams_from_nodes(FETCH_METHOD, config.node, self.clock, IDLE_CHANNEL_S, counters),
            directory=self.directory,
            engine=engine,
            registry=self.registry,
            prefill=streams_from_nodes(PREFILL_METHOD, config.node, self.clock, config.idle_channel_s, counters),
            clock=self.clock,
        )
        await node.start()
        self._stack.push_async_callback(node.shell.stop)
        return node

    async def registered(self, *nodes: Node) -> None:
        """Register these, and wait until each knows the others."""
        for node in nodes:
            await node.shell.check_health()
        async with asyncio.timeout(PATIENCE_S):
            while any(len(node.shell.exchange.peers()) < len(nodes) - 1 for node in nodes):  # noqa: ASYNC110  # as `holds`
                await asyncio.sleep(0.005)

    def process(self, entry: str, **changes: Any) -> ProcessEngine:
        """A canary in a process of its own; `entry` is one of tests/fakes/canary_*.py."""
        config = self.node_config(**changes).engine
        return ProcessEngine(entry, config, SEED, canary_memory(config))

    async def orchestrator(self, node: Node, **identity: Any) -> Orchestrator:
        channel = await self._channel(node.shell.address)
        call = channel.stream_stream(SESSION_METHOD)()
        await call.write(orchestrator_identity(**identity).to_hello().SerializeToString())
        hello = await call.read()
        assert isinstance(hello, bytes)
        orchestrator = Orchestrator(call, Identity.from_hello(node_pb2.Hello.FromString(hello)))
        self._owner.start(self._read(orchestrator), "orchestrator")
        self._stack.callback(call.cancel)
        await orchestrator.until(lambda: bool(orchestrator.beats))
        return orchestrator

    async def _read(self, orchestrator: Orchestrator) -> None:
        try:
            await orchestrator.read()
        except aio.AioRpcError:
            orchestrator.ended = True

    async def status(self, node: Node) -> NodeReport:
        channel = await self._channel(node.shell.address)
        return wire.decode(await channel.unary_unary(STATUS_METHOD)(b""), NodeReport)

    async def _channel(self, address: str) -> aio.Channel:
        return await self._stack.enter_async_context(Credentials(self.tls).channel(address))

    async def in_front_of(self, node: PrefillNode, tamper: Callable[[Frames], Frames]) -> "Front":
        """A server that serves what `tamper` makes of the node's hand-overs."""
        server = aio.server(options=SERVER_CHANNEL_OPTIONS)
        server.add_generic_rpc_handlers([stream_handler(PREFILL_METHOD, tamper(node.frames))])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        front = Front(server, PrefillTarget(node.shell.name, f"127.0.0.1:{port}", node.shell.incarnation))
        self._stack.push_async_callback(front.die)
        return front


class Front:
    def __init__(self, server: aio.Server, target: PrefillTarget) -> None:
        self.target = target
        self._server = server

    async def die(self) -> None:
        await self._server.stop(None)


def target(node: PrefillNode, **changes: Any) -> PrefillTarget:
    honest = PrefillTarget(node.shell.name, node.shell.address, node.shell.incarnation)
    return msgspec.structs.replace(honest, **changes)


async def holds(node: Node, attempts: int = 1) -> None:
    """Wait until the node holds so many attempts."""
    async with asyncio.timeout(PATIENCE_S):
        while node.in_flight < attempts:  # noqa: ASYNC110  # asked from outside, which no event reaches
            await asyncio.sleep(0.005)


async def lets_go(node: Node, keeping: int = 0) -> None:
    """Wait until the node holds no more than `keeping` attempts, whatever its engine is doing."""
    async with asyncio.timeout(PATIENCE_S):
        while node.in_flight > keeping:  # noqa: ASYNC110  # asked from outside, which no event reaches
            await asyncio.sleep(0.005)


async def at_rest(*nodes: Node) -> None:
    """Wait until every node holds nothing; TimeoutError, naming what is held, where one does not get there."""
    for node in nodes:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not _rests(node):  # noqa: ASYNC110  # the rest is seen in the engine's next report
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise TimeoutError(f"{node.shell.name} holds {node.in_flight} attempts, {node.shell.link.load}") from None


def _rests(node: Node) -> bool:
    load = node.shell.link.load
    if node.shell.state is NodeState.STOPPED:  # its engine is gone, and with it what it said last
        return node.in_flight == 0
    return node.in_flight == 0 and load.held_blocks == load.waiting == load.running == load.awaiting_blocks == 0


@asynccontextmanager
async def new_rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        yield Rig(stack)
