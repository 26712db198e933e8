"""A cluster for scenarios alone, started by the command that users type, with every link behind a proxy of ours."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.chaos.command_line import pronghorn
from cluster.chaos.links import ADVERTISED, Links
from cluster.chaos.local_site import LocalSite
from cluster.chaos.scenario import Cluster
from cluster.run_folder import RunFolder
from pronghorn.errors import ConfigurationError
from pronghorn.tasks import Owner

START_S = 900.0
DOWN_S = 180.0
OPTIONS = (
    "--kv-memory=192MiB", "--drain-timeout=10", "--threads=1", "--disaggregation=always", "--startup-timeout=840",
)  # fmt: skip
"""Small, patient, and apart always: a decode node that is idle would sooner compute short prompts by itself."""


@asynccontextmanager
async def own_cluster(root: Path, size: Cluster, say: Callable[[str], None], *more: str) -> AsyncIterator[LocalSite]:
    """`more`: further flags of `pronghorn up`. Raises ConfigurationError where it does not start."""
    name = f"chaos-{os.getpid()}-{secrets.token_hex(2)}"
    folder = RunFolder(root, name)
    pools = (f"--prefill={size.prefill}", f"--decode={size.decode}", f"--orchestrators={size.orchestrators}")
    links = Links(folder)
    links.start()
    say(f"starting {name}: {' '.join(pools)}")
    try:
        fixed = ("--detach", "--name", name, "--port=0", "--dashboard-port=0", f"--advertise-host={ADVERTISED}")
        try:
            await pronghorn(START_S, "up", *fixed, *pools, *OPTIONS, *more)
            run, state = folder.run(), folder.state()
            if run is None or state is None or state.url is None:
                raise ConfigurationError(f"the cluster {name} is not ready")
            site = LocalSite(run, state, links)
            await site.connect()
            try:
                yield site
            finally:
                await site.close()
        finally:
            say(f"ending {name}")
            await _to_its_end(pronghorn(DOWN_S, "down", "--name", name))
    finally:
        await links.stop()


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Also where it is cancelled meanwhile: a cluster that is half ended would stay."""
    task = Owner("ending").start(work, "down")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
