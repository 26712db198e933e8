"""A cluster that `pronghorn up` started on this machine: its processes, its Redis, and its links where they are ours.

Only a process that belongs to the run is ever struck; the registry tells its life and its pid, the run whether it is
ours. Links are ours where the cluster was started behind `links.py`.
"""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster import processes, verify_ledger
from cluster.chaos import memory_cgroup, namespaces
from cluster.chaos.command_line import pronghorn
from cluster.chaos.cut_proxy import CutProxy
from cluster.chaos.gcs import GcsServer
from cluster.chaos.links import Links
from cluster.chaos.machines import RayCluster
from cluster.chaos.namespaces import LossyNetwork, SmallDisk, disk_folder
from cluster.chaos.scenario import (
    Cluster,
    Fault,
    LinkFault,
    NamespaceFault,
    OutOfMemory,
    RayFault,
    RedisFlush,
    RedisKill,
    RedisPause,
    kind_of,
)
from cluster.chaos.site import Process, Site
from cluster.run_folder import Run, RunFolder, RunState, names
from kvcache.redis_directory import RedisDirectory
from kvcache.redis_registry import RedisRegistry
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation

REDIS_NAMES = ("valkey-server", "redis-server")
EDGES = {"haproxy": "haproxy", "serve": "ray::ProxyActor"}
"""By who takes HTTP: how its process is called."""
REDIS_TIMEOUT_S = 5.0
COMMAND_S = 900.0


def local_site(root: Path, url: str) -> "LocalSite | None":
    """The cluster under `root` that answers at `url`; None where none does."""
    for name in names(root):
        folder = RunFolder(root, name)
        run, state = folder.run(), folder.state()
        if run is not None and state is not None and state.url is not None and _same(state.url, url):
            return LocalSite(run, state)
    return None


def _same(one: str, other: str) -> bool:
    return one.rstrip("/").replace("localhost", "127.0.0.1") == other.rstrip("/").replace("localhost", "127.0.0.1")


class LocalSite(Site):
    def __init__(self, run: Run, state: RunState, links: Links | None = None, ray: RayCluster | None = None) -> None:
        assert state.url is not None and state.redis_url is not None
        super().__init__(state.url)
        self._run = run
        self._redis_url = state.redis_url
        self._links = links
        self._ray = ray
        self._registry = self._new_registry()

    def _new_registry(self) -> RedisRegistry:
        return RedisRegistry(self._redis_url, self._run.config.service.key_prefix)

    async def close(self) -> None:
        await self._registry.close()
        await super().close()

    # --- what can be done here ---

    def refusal(self, fault: Fault) -> str | None:
        if isinstance(fault, LinkFault) and self._links is None:
            return f"{kind_of(fault)} needs links that pass through a proxy of ours: leave out --target"
        if isinstance(fault, RayFault) and self._ray is None:
            return f"{kind_of(fault)} needs a Ray cluster of machines of ours: leave out --target"
        if isinstance(fault, OutOfMemory) and (refused := memory_cgroup.why_not()):
            return f"{kind_of(fault)}: {refused}"
        if isinstance(fault, NamespaceFault) and not namespaces.is_entered():
            return f"{kind_of(fault)}: {namespaces.why_not() or 'leave out --target'}"
        needs_server = isinstance(fault, RedisKill | RedisPause)
        if needs_server and self._redis_server() is None:
            return f"{kind_of(fault)} needs a Redis that the cluster started by itself"
        if isinstance(fault, RedisFlush) and self._redis_server() is None:
            return "redis-flush would empty a Redis that is not the cluster's own"
        return None

    async def size(self) -> Cluster:
        there = len(await self._registry.orchestrators.list())
        machines = 1 if self._ray is None else len(await asyncio.to_thread(self._ray.addresses))
        disks = 1 if self._run.config.service.node_settings.get("disk_offload_dir") else 0
        return msgspec.structs.replace(await super().size(), orchestrators=there, machines=machines, disks=disks)

    async def processes(self, role: str) -> list[Process]:
        if role == "orchestrator":
            rows = await self._registry.orchestrators.list()
            return [Process(row.name, role, row.incarnation, None, self._ours(row.pid)) for row in rows]
        if role == "edge":
            return [Process(name, role, Incarnation(f"{name}-{pid}"), None, pid) for name, pid in self._edges()]
        pids = {row.incarnation: row.pid for row in await self._registry.list()}
        found = [
            Process(p.name, p.role, p.incarnation, p.address, self._ours(pids.get(p.incarnation)))
            for p in await super().processes(role)
        ]
        return [process for process in found if process.pid is not None]

    def engine(self, node: Process) -> int:
        try:
            children = psutil.Process(node.pid).children()
        except psutil.NoSuchProcess:
            children = []
        for child in children:
            if any(word.endswith("_nodes.engine") for word in processes.words_of(child)):
                return child.pid
        raise Unavailable(f"{node.name} has no engine now")

    def _edges(self) -> list[tuple[str, int]]:
        name = EDGES.get(self._run.edge)
        named = [(_name(process), process) for process in self.of_run()]
        return [(name, process.pid) for is_called, process in named if name == is_called]

    def _ours(self, pid: int | None) -> int | None:
        """`pid`, where it belongs to the run."""
        try:
            ours = pid is not None and any(
                processes.belongs(psutil.Process(pid), run_id, temp_dir) for run_id, temp_dir in self._runs
            )
        except psutil.Error:
            ours = False
        return pid if ours else None

    @property
    def temp_dir(self) -> Path:
        return Path(self._run.temp_dir)

    @property
    def _runs(self) -> list[tuple[str, Path]]:
        own = (self._run.run_id, self.temp_dir)
        return [own] if self._ray is None else [own, (self._ray.run_id, self._ray.temp_dir)]

    def of_run(self) -> list[psutil.Process]:
        """Ray's as well, where it was started for it."""
        return [process for run_id, temp_dir in self._runs for process in processes.of_run(run_id, temp_dir)]

    def link(self, process: Process) -> CutProxy:
        if self._links is None or process.address is None:
            return super().link(process)
        return self._links.before(process.address)

    def _redis_server(self) -> psutil.Process | None:
        return next((process for process in processes.of_run(*self._runs[0]) if _name(process) in REDIS_NAMES), None)

    def redis_pid(self) -> int:
        server = self._redis_server()
        if server is None:
            raise Unavailable("the cluster's Redis does not run now")
        return server.pid

    def raylet(self, node: Process) -> psutil.Process:
        return super().raylet(node) if self._ray is None else self._ray.raylet(node.host)

    async def add_machine(self) -> str:
        return await (super().add_machine() if self._ray is None else asyncio.to_thread(self._ray.add_machine))

    @property
    def network(self) -> LossyNetwork:
        return LossyNetwork() if namespaces.is_entered() else super().network

    @property
    def disk(self) -> SmallDisk:
        return SmallDisk(disk_folder()) if namespaces.is_entered() else super().disk

    @property
    def gcs(self) -> GcsServer:
        return super().gcs if self._ray is None else self._ray.gcs

    async def command(self, *arguments: str) -> None:
        own = None if self._ray is None else self._ray.client_environ
        await pronghorn(COMMAND_S, *arguments, "--name", self._run.config.name, environ=own)

    async def flush_redis(self) -> int:
        redis = Redis.from_url(self._redis_url, socket_timeout=REDIS_TIMEOUT_S)
        try:
            keys = int(await redis.dbsize())
            await redis.flushall()
            return keys
        except RedisError as error:
            raise Unavailable(f"Redis was not flushed: {error}") from None
        finally:
            await redis.aclose()

    async def directory_entries(self) -> int:
        """How many blocks of nodes the directory has a row of. Raises Unavailable."""
        directory = RedisDirectory(self._redis_url, self._run.config.service.key_prefix, 1)
        try:
            return await directory.entries()
        finally:
            await directory.close()

    async def operations(self) -> list[tuple[int, str]]:
        """Pid and operations address of every process that is registered. Raises Unavailable."""
        nodes = await self._registry.list()
        told = [(row.pid, row.operations_address) for row in nodes if row.operations_address is not None]
        return [*told, *await self.orchestrators()]

    async def orchestrators(self) -> list[tuple[int, str]]:
        """As `operations`, of orchestrators alone."""
        rows = await self._registry.orchestrators.list()
        return [(row.pid, row.operations_address) for row in rows if row.operations_address is not None]

    # --- what must hold ---

    async def lives(self) -> Counter[str]:
        return await super().lives() + Counter(orchestrator=len(await self._registry.orchestrators.list()))

    async def is_whole(self, before: Counter[str], gone: set[Incarnation]) -> bool:
        """The registry says so too."""
        try:
            rows = await self._registry.list()
            orchestrators = await self._registry.orchestrators.list()
        except Unavailable:
            return False
        there = Counter(row.role for row in rows) + Counter(orchestrator=len(orchestrators))
        lives = {row.incarnation for row in rows} | {row.incarnation for row in orchestrators}
        if any(there[role] < before[role] for role in before) or lives & gone:
            return False
        return await super().is_whole(before, gone)

    async def leftovers(self, wait_s: float) -> list[str]:
        """As `pronghorn verify ledger` finds them."""
        report = await verify_ledger.audit(
            self._new_registry(), lambda: verify_ledger.replicas_of(self.of_run()), wait_s
        )
        left = [str(leftover) for leftover in report.leftovers]
        return left or ([] if report.at_rest else [f"not at rest after {report.looks} looks"])


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
