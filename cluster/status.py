"""What a cluster on this machine looks like now, gathered from those who know: the run's folder, an orchestrator,
Redis, the operating system. Everything that does not answer is said to be absent; nothing is guessed.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import httpx
import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from cluster import processes
from cluster.config_problems import redacted
from cluster.run_folder import Run, RunFolder, RunState
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord, OrchestratorRecord
from pipelines.types.frames import NodeReport
from pronghorn.errors import ConfigurationError, Unavailable

HTTP_TIMEOUT_S = 5.0


class RedisStatus(msgspec.Struct, frozen=True):
    url: str
    """Without its password."""
    reachable: bool
    registered: list[str]
    """Names of the nodes with a live lease."""
    error: str | None = None
    operations: dict[str, str] = {}
    """The operations port of every node and orchestrator that is registered, by its name."""


class Listener(msgspec.Struct, frozen=True):
    address: str
    process: str


class ModelStatus(msgspec.Struct, frozen=True):
    name: str
    ready: bool
    reason: str
    in_flight: int
    pools: dict[str, int] = {}
    """Healthy nodes by role."""


class ClusterStatus(msgspec.Struct, frozen=True):
    name: str
    phase: Literal["starting", "ready", "stopping", "failed", "abandoned"]
    """"abandoned": the supervisor was killed; `pronghorn down` ends what is left."""
    url: str | None
    dashboard_url: str | None
    ray_address: str | None
    edge: str | None
    models: list[ModelStatus]
    ready: bool
    reason: str
    in_flight: int
    pools: dict[str, int]
    """Healthy nodes by role, of all models."""
    blocks: dict[str, int]
    """free + held = total, summed over the nodes; cached counts free blocks whose content can be reused."""
    nodes: list[NodeReport]
    counters: dict[str, int]
    redis: RedisStatus | None
    listening: list[Listener]


class _Answer(msgspec.Struct):
    """`GET /internal/status` of an orchestrator."""

    models: list[ModelStatus]
    ready: bool
    reason: str
    in_flight: int
    nodes: list[NodeReport]
    counters: dict[str, int]


def gather(folder: RunFolder) -> ClusterStatus:
    """Raises ConfigurationError where no such cluster is here."""
    run, state, supervised = folder.run(), folder.state(), folder.is_supervised()
    if run is None and not supervised:
        raise ConfigurationError(f"no cluster {folder.name!r} runs on this machine; start one with `pronghorn up`")
    state = state or RunState("starting", folder.holder_pid() or 0)
    answer, problem = _ask_orchestrator(state)
    nodes = answer.nodes if answer else []
    return ClusterStatus(
        name=folder.name,
        phase=state.phase if supervised else "abandoned",
        url=state.url,
        dashboard_url=state.dashboard_url,
        ray_address=state.ray_address,
        edge=state.edge,
        models=[replace(model, pools=_pools(n for n in nodes if n.model == model.name)) for model in answer.models]
        if answer
        else [],
        ready=answer.ready if answer else False,
        reason=answer.reason if answer else problem,
        in_flight=answer.in_flight if answer else 0,
        pools=_pools(nodes),
        blocks={
            "total": sum(n.total_blocks for n in nodes),
            "free": sum(n.free_blocks for n in nodes),
            "held": sum(n.held_blocks for n in nodes),
            "cached": sum(n.cached_blocks for n in nodes),
        },
        nodes=nodes,
        counters=answer.counters if answer else {},
        redis=asyncio.run(_ask_redis(state.redis_url, run.config.service.key_prefix))
        if run and state.redis_url
        else None,
        listening=_listening(run) if run else [],
    )


def _pools(nodes: Iterable[NodeReport]) -> dict[str, int]:
    healthy = [node.role for node in nodes if node.healthy]
    return {role: healthy.count(role) for role in ("prefill", "decode")}


def _ask_orchestrator(state: RunState) -> tuple[_Answer | None, str]:
    if state.url is None:
        return None, "not ready yet"
    try:
        answer = httpx.get(f"{state.url}/internal/status", timeout=HTTP_TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_Answer), ""
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        return None, f"the HTTP edge does not answer: {error}"


async def _ask_redis(url: str, key_prefix: str) -> RedisStatus:
    registry = RedisRegistry(url, key_prefix)
    try:
        nodes = await registry.list()
        rows: list[NodeRecord | OrchestratorRecord] = [*nodes, *await registry.orchestrators.list()]
    except Unavailable as error:
        return RedisStatus(redacted(url), False, [], error.message)
    finally:
        await registry.close()
    operations: dict[str, str] = {
        row.name: row.operations_address for row in rows if row.operations_address is not None
    }
    return RedisStatus(redacted(url), True, [row.name for row in nodes], operations=operations)


def _listening(run: Run) -> list[Listener]:
    return [Listener(address, title) for address, title in processes.listening(run.run_id, Path(run.temp_dir))]


def show(status: ClusterStatus, console: Console) -> None:
    console.print(f"[bold]{status.name}[/bold]  {status.phase}  {status.reason}", highlight=False)
    facts = {
        "url": status.url,
        "dashboard": status.dashboard_url,
        "models": "; ".join(map(_model_line, status.models)) or None,
        "HTTP edge": status.edge,
        "Ray": status.ray_address,
        "Redis": _redis_line(status.redis),
        "in flight": str(status.in_flight),
        "blocks": ", ".join(f"{count} {kind}" for kind, count in status.blocks.items()),
    }
    for name, value in facts.items():
        if value is not None:
            console.print(f"  {name:<10} {value}", highlight=False)
    if status.nodes:
        console.print(_nodes_table(status.nodes))
    if status.redis is not None and status.redis.operations:
        console.print(_operations_table(status.redis.operations))
    if status.listening:
        console.print(_listeners_table(status.listening))


def _model_line(model: ModelStatus) -> str:
    pools = ", ".join(f"{count} {role}" for role, count in model.pools.items())
    return f"{model.name}: {pools}" + ("" if model.ready else f", not ready ({model.reason})")


def _redis_line(redis: RedisStatus | None) -> str | None:
    if redis is None:
        return None
    if not redis.reachable:
        return f"{redis.url} does not answer: {redis.error}"
    return f"{redis.url}, {len(redis.registered)} nodes registered"


def _nodes_table(nodes: list[NodeReport]) -> Table:
    table = Table(box=None)
    for heading in ("node", "pool", "address", "health"):
        table.add_column(heading, no_wrap=True)
    for heading in ("in flight", "running", "waiting", "free", "held", "cached", "prompt tok/s", "output tok/s"):
        table.add_column(heading, justify="right")
    for node in nodes:
        health = "draining" if node.draining else "healthy" if node.healthy else "unhealthy"
        numbers = (node.in_flight, node.running, node.waiting, node.free_blocks, node.held_blocks, node.cached_blocks)
        rates = (node.prompt_throughput, node.generation_throughput)
        table.add_row(
            node.name, node.role, node.address, health, *map(str, numbers), *(f"{rate:.0f}" for rate in rates)
        )
    return table


def _operations_table(operations: dict[str, str]) -> Table:
    table = Table("operations of", "/health /ready /metrics /internal/ledger at", box=None)
    for name, address in operations.items():
        table.add_row(name, f"http://{address}")
    return table


def _listeners_table(listening: list[Listener]) -> Table:
    table = Table(box=None)
    table.add_column("process", no_wrap=True)
    table.add_column("listens on")
    for process in sorted({item.process for item in listening}):
        table.add_row(process, ", ".join(item.address for item in listening if item.process == process))
    return table
