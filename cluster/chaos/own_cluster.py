"""A cluster for scenarios alone, started by the command that users type.

On one machine every link passes a proxy of ours. Several machines are a Ray of ours, whose GCS keeps its state in a
Redis, with the orchestrators on the head and the nodes on the others; there nodes reach each other over gRPC alone.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from cluster import config
from cluster.chaos import namespaces
from cluster.chaos.command_line import pronghorn
from cluster.chaos.links import ADVERTISED, Links
from cluster.chaos.local_site import LocalSite
from cluster.chaos.machines import RayCluster, machines
from cluster.chaos.namespaces import DISK_BYTES, disk_folder
from cluster.chaos.scenario import Cluster
from cluster.redis_server import RedisServer
from cluster.run_folder import RunFolder
from pronghorn.errors import ConfigurationError
from pronghorn.tasks import Owner

START_S = 900.0
DOWN_S = 180.0
OPTIONS = (
    "--kv-memory=192MiB", "--drain-timeout=10", "--threads=1", "--disaggregation=always", "--startup-timeout=840",
)  # fmt: skip
"""Small, patient, and apart always: a decode node that is idle would sooner compute short prompts by itself."""
OF_SEVERAL = (
    "proxy_location=HeadOnly",  # all have the same loopback, where their proxies could not be told apart
    "service.shared_memory=false",
    "service.placement.orchestrator.labels.machine=2",
    *(f"service.placement.{pool}.labels.machine=!2" for pool in ("prefill", "decode")),
    *(f"service.placement.{pool}.max_per_machine=1" for pool in ("prefill", "decode")),
)


@asynccontextmanager
async def own_cluster(
    root: Path, size: Cluster, say: Callable[[str], None], *more: str, settings: dict[str, str] | None = None
) -> AsyncIterator[LocalSite]:
    """`more`: further flags of `pronghorn up`; `settings` are in the environment of every process. Raises
    ConfigurationError where it does not start."""
    name = f"chaos-{os.getpid()}-{secrets.token_hex(2)}"
    folder = RunFolder(root, name)
    pools = (f"--prefill={size.prefill}", f"--decode={size.decode}", f"--orchestrators={size.orchestrators}")
    say(f"starting {name} on {size.machines} machines: {' '.join(pools)}")
    fixed = (*pools, *OPTIONS, *(_on_disk() if size.disks else ()), *more)
    if size.machines > 1:
        with _several(name, size.machines, settings or {}) as ray:
            placed = (f"--address={ray.address}", *(f"--option={option}" for option in OF_SEVERAL))
            async with started(folder, say, (*fixed, *placed), ray.client_environ, ray=ray) as site:
                yield site
        return
    links = Links(folder)
    links.start()
    try:
        behind = (*fixed, f"--advertise-host={ADVERTISED}")
        async with started(folder, say, behind, config.environment() | (settings or {}), links) as site:
            yield site
    finally:
        await links.stop()


@asynccontextmanager
async def started(
    folder: RunFolder,
    say: Callable[[str], None],
    options: tuple[str, ...],
    environ: dict[str, str],
    links: Links | None = None,
    ray: RayCluster | None = None,
) -> AsyncIterator[LocalSite]:
    """`pronghorn up` with these flags, and its end. Raises ConfigurationError where it does not start."""
    try:
        fixed = ("--detach", "--name", folder.name, "--port=0", "--dashboard-port=0")
        await pronghorn(START_S, "up", *fixed, *options, environ=environ)
        run, state = folder.run(), folder.state()
        if run is None or state is None or state.url is None:
            raise ConfigurationError(f"the cluster {folder.name} is not ready")
        site = LocalSite(run, state, links, ray)
        await site.connect()
        try:
            yield site
        finally:
            await site.close()
    finally:
        say(f"ending {folder.name}")
        await _to_its_end(pronghorn(DOWN_S, "down", "--name", folder.name, environ=environ))


def _on_disk() -> tuple[str, ...]:
    """A tier on the small disk of our namespaces, as large as that disk, and none in memory before it."""
    if not namespaces.is_entered():
        return ()
    tier = ("host_offload_bytes=0", f"disk_offload_bytes={DISK_BYTES}", f"disk_offload_dir={disk_folder()}")
    return tuple(f"--node-set={setting}" for setting in tier)


@contextmanager
def _several(name: str, count: int, settings: dict[str, str]) -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="pv-", dir="/tmp") as folder:
        of_gcs, of_nodes = (RedisServer(Path(folder) / who, config.environment()) for who in ("gcs", "nodes"))
        try:
            of_gcs.start()
            of_nodes.start()
            environ = {**settings, config.REDIS_VARIABLE: of_nodes.url}
            with machines(name, (0,) * count, environ, of_gcs) as ray:
                yield ray
        finally:
            of_nodes.stop()
            of_gcs.stop()


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Also where it is cancelled meanwhile: a cluster that is half ended would stay."""
    task = Owner("ending").start(work, "down")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
