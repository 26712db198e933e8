"""What the processes of a cluster on this machine take now, and what this one takes that watches them.

The operating system tells memory, threads and descriptors; whoever has an operations port tells its tasks, and an
orchestrator the size of its index. Of Redis's rows those are stray that no orchestrator's index knows, which has them
from the nodes themselves. Whoever does not answer is left out of that sample.
"""

import asyncio
import re
from contextlib import suppress

import httpx
import psutil

from cluster.chaos.growth import MIB, Life, Taken
from cluster.chaos.local_site import LocalSite
from cluster.processes import words_of
from pronghorn.errors import Unavailable

SAMPLE = re.compile(r"^pronghorn:(block_index_bytes|block_index_entries|held)\{([^}]*)\} (\S+)$", re.MULTILINE)
TITLE = 60


async def footprints(site: LocalSite) -> list[Taken]:
    found = await asyncio.to_thread(of_system, site)
    told = await _told(site)
    return [Taken(life, title, {**amounts, **told.get(life.pid, {})}) for life, title, amounts in found]


def of_system(site: LocalSite) -> list[Taken]:
    found = []
    for process in (*site.of_run(), psutil.Process()):
        with suppress(psutil.Error), process.oneshot():
            words = words_of(process)
            title = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words)[:TITLE] or process.name()
            memory = process.memory_info()
            amounts = {
                "MiB": memory.rss / MIB,
                "own MiB": (memory.rss - memory.shared) / MIB,
                "threads": float(process.num_threads()),
                "descriptors": float(process.num_fds()),
            }
            found.append(Taken(Life(process.pid, process.create_time()), title, amounts))
    return found


async def _told(site: LocalSite) -> dict[int, dict[str, float]]:
    """By pid."""
    found: dict[int, dict[str, float]] = {}
    known_rows: list[float] = []
    with suppress(Unavailable):
        for pid, address in await site.operations():
            with suppress(httpx.HTTPError):
                metrics = (await site.http.get(f"http://{address}/metrics")).text
                found[pid] = amounts(metrics)
                known_rows += rows_known(metrics)
    with suppress(Unavailable):
        if known_rows:
            stray = await site.directory_entries() - max(known_rows)
            found[site.redis_pid()] = {"stray rows": max(0.0, stray)}
    return found


def rows_known(metrics: str) -> list[float]:
    """The entries of an orchestrator's index, of all its models; empty of everybody else."""
    found = [float(value) for name, _, value in SAMPLE.findall(metrics) if name == "block_index_entries"]
    return [sum(found)] if found else []


def amounts(metrics: str) -> dict[str, float]:
    """Of a process's metrics, in Prometheus's text format."""
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(metrics):
        if name == "block_index_bytes":
            found["index KiB"] = found.get("index KiB", 0.0) + float(value) / 1024
        elif name == "held" and 'kind="task"' in labels:
            found["tasks"] = found.get("tasks", 0.0) + float(value)
    return found
