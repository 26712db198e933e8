"""Nodes and orchestrators as simulated processes: started, watched as Ray Serve does, killed, paused, replaced.

Composition only: the real shells and the real replica over a simulated engine, channel, server, registry and clock.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random

import msgspec

from cluster.simulator.canary import block_bytes
from cluster.simulator.channel import Directory
from cluster.simulator.network import Link, Network
from cluster.simulator.plan import BLOCK_TOKENS, NodePlan, Plan
from cluster.simulator.process import SimClock, SimProcess
from cluster.simulator.registry_link import DirectoryLink, RegistryLink, SimRedis
from cluster.simulator.sim_engine import EngineTiming, SimEngine
from cluster.simulator.story import Story
from cluster.simulator.virtual_loop import VirtualLoop
from decode_nodes.config import DecodeNodeConfig
from decode_nodes.node import DecodeNode
from decode_nodes.scheduler import DecodeScheduler
from kvcache.handshake import Identity
from kvcache.hashing import seed_digest
from orchestrator.config import OrchestratorConfig
from orchestrator.node_client import GrpcConnector
from orchestrator.replica import Replica
from pipelines.node.config import NodeConfig
from pipelines.node.stream_client import IDLE_CHANNEL_S, StreamClient
from pipelines.runtime.config import EngineConfig
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.node import PrefillNode
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation, NodeName
from pronghorn.wire import FETCH_METHOD, PREFILL_METHOD

MODEL = "canary"
CLUSTER_SEED = bytes(range(32))
LEASE_S = 3.0
HEALTH_CHECK_PERIOD_S = 1.0
STARTUP_S = 0.05
REPLACEMENT_S = 0.5
DRAIN_S = 4.0
RELIST_PERIOD_S = 2.0


@dataclass(eq=False)
class SimNode:
    """One life of a node."""

    plan: NodePlan
    process: SimProcess
    engine: SimEngine
    node: PrefillNode | DecodeNode
    gone: bool = False
    """Stopped in good order, or killed."""

    @property
    def host(self) -> str:
        return self.plan.name

    @property
    def processes(self) -> tuple[SimProcess, SimProcess]:
        return self.process, self.engine.process


@dataclass(eq=False)
class SimOrchestrator:
    name: str
    process: SimProcess
    replica: Replica
    clock: SimClock
    paused_s: float = 0.0
    gone: bool = False


@dataclass
class Hosts:
    """Everybody who lives, or has lived, in one simulation."""

    plan: Plan
    loop: VirtualLoop
    random: Random
    story: Story
    network: Network = field(init=False)
    nodes: list[SimNode] = field(default_factory=list)
    orchestrators: list[SimOrchestrator] = field(default_factory=list)
    on_orchestrator_death: Callable[[SimOrchestrator], None] = lambda _: None

    def __post_init__(self) -> None:
        plan = self.plan
        self.network = Network(
            self.loop,
            self.random,
            Link(plan.link_delay_s, plan.link_jitter_s, plan.link_bytes_per_s),
            plan.window_bytes,
        )
        self.network.late_frames = plan.late_frames
        self.redis = SimRedis(SimClock(self.loop), CLUSTER_SEED)
        self.directory = Directory(self.network)
        self.replacing = 0
        """Nodes that are gone, whose successors have not started yet."""
        self._lives = 0

    # --- who is there -------------------------------------------------------------------------------------------------

    def node(self, name: str) -> SimNode | None:
        """The current life of that name."""
        return next((n for n in reversed(self.nodes) if n.plan.name == name and not n.gone), None)

    def orchestrator(self, name: str) -> SimOrchestrator | None:
        return next((o for o in reversed(self.orchestrators) if o.name == name and not o.gone), None)

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if not node.gone]

    def processes(self) -> list[SimProcess]:
        return [p for n in self.nodes for p in n.processes] + [o.process for o in self.orchestrators]

    # --- nodes --------------------------------------------------------------------------------------------------------

    def start_node(self, plan: NodePlan) -> SimNode:
        self._lives += 1
        process = SimProcess(f"{plan.name}~{self._lives}")
        node = process.enter(self._build_node, plan, process, self._lives)
        self.nodes.append(node)
        process.start(self._live(node), "life")
        return node

    def _build_node(self, plan: NodePlan, process: SimProcess, life: int) -> SimNode:
        clock = SimClock(self.loop, plan.clock_offset_s, plan.clock_rate)
        config = self._node_config(plan)
        timing = EngineTiming(STARTUP_S, plan.step_s, plan.token_s)
        registry = RegistryLink(self.redis, self.network, plan.name, self.random)
        new_server = self.directory.new_server(process, plan.name)
        new_channel = self.directory.new_channel(process, plan.name)
        node: PrefillNode | DecodeNode
        engine_process = SimProcess(f"{process.name}/engine")
        if plan.role == "prefill":
            engine = SimEngine(engine_process, clock, PrefillScheduler, config.engine, CLUSTER_SEED, timing)
            node = PrefillNode(
                name=NodeName(plan.name),
                config=PrefillNodeConfig(node=config, quiet_engine_s=2.0),
                hash_seed=CLUSTER_SEED,
                fetch=StreamClient(FETCH_METHOD, clock, IDLE_CHANNEL_S, new_channel),
                directory=DirectoryLink(registry, self.redis) if self.plan.directory else None,
                engine=engine,
                registry=registry,
                clock=clock,
                new_server=new_server,
            )
        else:
            engine = SimEngine(engine_process, clock, DecodeScheduler, config.engine, CLUSTER_SEED, timing)
            decode = DecodeNodeConfig(node=config, stall_timeout_s=plan.stall_timeout_s)
            node = DecodeNode(
                name=NodeName(plan.name),
                config=decode,
                hash_seed=CLUSTER_SEED,
                fetch=StreamClient(FETCH_METHOD, clock, IDLE_CHANNEL_S, new_channel),
                directory=DirectoryLink(registry, self.redis) if self.plan.directory else None,
                engine=engine,
                registry=registry,
                prefill=StreamClient(PREFILL_METHOD, clock, decode.idle_channel_s, new_channel),
                clock=clock,
                new_server=new_server,
            )
        node.shell.incarnation = Incarnation(f"{life:032x}")
        node.shell.registered_at_unix_s = clock.unix_s()
        return SimNode(plan, process, engine, node)

    def _node_config(self, plan: NodePlan) -> NodeConfig:
        engine = EngineConfig(
            model_path="canary:",
            model_name=MODEL,
            num_blocks=plan.num_blocks,
            block_tokens=BLOCK_TOKENS,
            max_batch_size=plan.max_batch_size,
            max_batch_input_tokens=max(12, plan.max_batch_size),
            max_waiting=plan.max_waiting,
            enable_prefix_caching=self.plan.prefix_caching,
            report_period_s=0.5,
            stall_timeout_s=3.0,
        )
        return NodeConfig(
            engine=engine,
            redis_url="",
            key_prefix="",
            host=plan.name,
            lease_s=LEASE_S,
            max_in_flight=plan.max_in_flight,
            host_offload_bytes=plan.host_blocks * block_bytes(BLOCK_TOKENS),
            drain_timeout_s=DRAIN_S,
            stop_grace_s=1.0,
        )

    async def _live(self, node: SimNode) -> None:
        """As Ray Serve has it: start, check, and replace what is unhealthy. Runs as the node's process."""
        await node.node.start()
        try:
            while True:
                await node.node.shell.check_health()
                await asyncio.sleep(HEALTH_CHECK_PERIOD_S)
        except Unavailable as error:
            if node.gone or node.node.shell.state.value in ("draining", "stopped"):
                return
            self.story.tell(f"{node.host} is unhealthy, and is replaced: {error.message}")
            await node.node.shell.stop()
            self._left(node)
            self.replacing += 1
            self.loop.call_later(REPLACEMENT_S, self._replace, node.plan, context=Context())

    def _replace(self, plan: NodePlan) -> None:
        self.replacing -= 1
        self.start_node(self.successor(plan))

    def successor(self, plan: NodePlan) -> NodePlan:
        """The same node under a new name."""
        stem = plan.name.split("+")[0]
        count = sum(n.plan.name.split("+")[0] == stem for n in self.nodes)
        return msgspec.structs.replace(plan, name=f"{stem}+{count}")

    async def drain(self, node: SimNode) -> None:
        """As the node's process."""
        await node.node.drain(DRAIN_S)
        self._left(node)

    async def stop(self, node: SimNode) -> None:
        await node.node.shell.stop()
        self._left(node)

    def _left(self, node: SimNode) -> None:
        node.gone = True
        node.engine.process.kill()

    def kill_node(self, node: SimNode) -> None:
        node.gone = True
        for process in node.processes:
            process.kill()
        self.network.died(node.process)

    # --- orchestrators ------------------------------------------------------------------------------------------------

    def start_orchestrator(self, name: str) -> SimOrchestrator:
        self._lives += 1
        process = SimProcess(f"{name}~{self._lives}")
        orchestrator = process.enter(self._build_orchestrator, name, process, self._lives)
        self.orchestrators.append(orchestrator)
        process.enter(orchestrator.replica.start)
        return orchestrator

    def _build_orchestrator(self, name: str, process: SimProcess, life: int) -> SimOrchestrator:
        plan = self.plan
        config = OrchestratorConfig(
            redis_url="",
            key_prefix="",
            model_name=MODEL,
            model_path="",
            max_length=4096,
            max_in_flight=plan.max_in_flight,
            max_queue=plan.max_queue,
            max_attempts=plan.max_attempts,
            reconnect_min_s=plan.reconnect_min_s,
            relist_period_s=RELIST_PERIOD_S,
        )
        identity = Identity(
            role="orchestrator",
            name=name,
            incarnation=f"{life:032x}",
            model=MODEL,
            seed_digest=seed_digest(CLUSTER_SEED),
        )
        connector = GrpcConnector(
            identity, config.connect_timeout_s, config.send_queue_frames, self.directory.new_channel(process, name)
        )
        clock = SimClock(self.loop, self.random.uniform(-300.0, 300.0))
        registry = RegistryLink(self.redis, self.network, name, self.random)
        random = Random(f"routing/{plan.seed}/{name}/{life}")
        replica = Replica(config, registry, connector, clock, seed=CLUSTER_SEED, random=random)
        return SimOrchestrator(name, process, replica, clock)

    def kill_orchestrator(self, orchestrator: SimOrchestrator) -> None:
        orchestrator.gone = True
        orchestrator.process.kill()
        self.network.died(orchestrator.process)
        self.on_orchestrator_death(orchestrator)
