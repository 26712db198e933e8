"""The cluster that a scenario is done to, as far as its URL tells: what it serves, its nodes, whether it is whole.

A fault that needs more than the API and the nodes' own servers is refused by name: signals, links and Redis can be
had only where the cluster runs on this machine (`local_site.py`).
"""

import asyncio
import time
from collections import Counter
from contextlib import suppress

import httpx
import msgspec
import psutil

from cluster.chaos.cut_proxy import CutProxy
from cluster.chaos.gcs import GcsServer
from cluster.chaos.namespaces import LossyNetwork, SmallDisk
from cluster.chaos.scenario import (
    Cluster,
    CommandFault,
    Fault,
    LinkFault,
    NamespaceFault,
    RedisFlush,
    SignalFault,
    kind_of,
)
from cluster.status import ModelStatus
from pipelines.types.frames import NodeReport
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation

TIMEOUT_S = 10.0
POLL_S = 0.1


class Status(msgspec.Struct):
    """`GET /internal/status` of an orchestrator."""

    models: list[ModelStatus]
    ready: bool
    reason: str
    in_flight: int
    nodes: list[NodeReport]

    @property
    def model(self) -> str:
        """What is asked for; raises Unavailable where nothing is served."""
        if not self.models:
            raise Unavailable("the cluster serves no model")
        return self.models[0].name

    def healthy(self) -> Counter[str]:
        return Counter(node.role for node in self.nodes if node.healthy and not node.draining)

    def lives(self) -> set[Incarnation]:
        return {node.incarnation for node in self.nodes if node.healthy}


class Process(msgspec.Struct, frozen=True):
    """One that can be struck. `pid` is of this machine; None where it is not, or not known."""

    name: str
    role: str
    incarnation: Incarnation
    address: str | None
    pid: int | None

    @property
    def host(self) -> str:
        return (self.address or "").rpartition(":")[0]


class Site:
    """Any cluster that answers at `url`. `connect` before anything else, `close` after."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client: httpx.AsyncClient | None = None

    async def connect(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    @property
    def http(self) -> httpx.AsyncClient:
        assert self._client is not None, "connect first"
        return self._client

    async def status(self) -> Status:
        """Raises Unavailable where no orchestrator says."""
        try:
            answer = await self.http.get("/internal/status")
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=Status)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise Unavailable(f"{self.url} does not say how it is: {error!r}") from None

    async def forget_prefixes(self) -> bool:
        """Whether there was a cache, and it was reset. Raises Unavailable where nobody says."""
        try:
            return (await self.http.post("/reset_prefix_cache")).status_code == httpx.codes.OK
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url} does not say whether it forgot: {error!r}") from None

    # --- what can be done here ---

    def refusal(self, fault: Fault) -> str | None:
        """Why this fault cannot be done to this cluster; None where it can."""
        if isinstance(fault, SignalFault | LinkFault | NamespaceFault | CommandFault | RedisFlush):
            return f"{kind_of(fault)} needs a cluster that runs on this machine, and {self.url} is none"
        return None

    async def size(self) -> Cluster:
        """Healthy nodes, and the orchestrators that are known of. Raises Unavailable where nobody says."""
        healthy = (await self.status()).healthy()
        return Cluster(healthy["prefill"], healthy["decode"], orchestrators=1)

    async def processes(self, role: str) -> list[Process]:
        """Those of a pool of the model that is asked, where they are healthy, the busiest first."""
        status = await self.status()
        asked = [node for node in status.nodes if node.role == role and node.model == status.model]
        nodes = [node for node in asked if node.healthy and not node.draining]
        nodes.sort(key=lambda node: (-node.in_flight, node.name))
        return [Process(node.name, node.role, node.incarnation, node.address, None) for node in nodes]

    def link(self, process: Process) -> CutProxy:
        raise Unavailable(f"the link of {process.name} does not pass through a proxy of ours")

    def engine(self, node: Process) -> int:
        """The pid of its engine, on this machine. Raises Unavailable where it has none, as the others do."""
        raise Unavailable(f"the engine of {node.name} is not on this machine")

    def redis_pid(self) -> int:
        raise Unavailable("the Redis of this cluster is not on this machine")

    def raylet(self, node: Process) -> psutil.Process:
        """Of the machine that it runs on."""
        raise Unavailable(f"the machine of {node.name} is not ours")

    async def add_machine(self) -> str:
        """Its address, once Ray runs there. Raises ConfigurationError where it does not come up."""
        raise Unavailable("the machines of this cluster are not ours")

    @property
    def network(self) -> LossyNetwork:
        raise Unavailable("the network of this cluster is not its own")

    @property
    def disk(self) -> SmallDisk:
        raise Unavailable("the disk of this cluster is not its own")

    @property
    def gcs(self) -> GcsServer:
        raise Unavailable("the GCS of this cluster is not ours")

    async def command(self, *arguments: str) -> None:
        """A command of `pronghorn` about this cluster. Raises ConfigurationError with what it says."""
        raise Unavailable("this cluster was not started on this machine")

    async def flush_redis(self) -> int:
        """How many keys there were."""
        raise Unavailable("the Redis of this cluster is not known")

    # --- what must hold ---

    async def lives(self) -> Counter[str]:
        """Healthy processes by role. Raises Unavailable where nobody says."""
        return (await self.status()).healthy()

    async def is_whole(self, before: Counter[str], gone: set[Incarnation]) -> bool:
        """Every pool is as large as `before` without those that are `gone`, and it is ready."""
        try:
            status = await self.status()
        except Unavailable:
            return False
        there = status.healthy()
        enough = all(there[role] >= before[role] for role in ("prefill", "decode"))
        return status.ready and enough and not (status.lives() & gone)

    async def leftovers(self, wait_s: float) -> list[str]:
        """What is held for requests that have ended, once `wait_s` have not changed it."""
        give_up_s = time.monotonic() + wait_s
        while True:
            left = ["it does not answer"]
            with suppress(Unavailable):
                status = await self.status()
                left = [f"{node.name}: {node.held_blocks} blocks held, {node.in_flight} in flight"
                        for node in status.nodes if node.held_blocks or node.in_flight]  # fmt: skip
                left += [f"orchestrator: {status.in_flight} in flight"] if status.in_flight else []
            if not left or time.monotonic() >= give_up_s:
                return left
            await asyncio.sleep(POLL_S)
