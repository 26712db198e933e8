"""`pronghorn verify ledger`: every node and orchestrator of the registry is asked what it holds, and what does not add
up is named.

It waits for rest, within a bound. What is found in one look only was in motion; what two looks in a row find is left
over. Clean means: everybody answers, holds nothing for a request, and no two of them contradict each other.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import msgspec
import psutil
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from cluster import processes
from cluster.ledger_audit import Leftover, Look, Registered, lasting, leftovers
from cluster.run_folder import RunFolder
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord, NodeRegistry, OrchestratorRecord
from pronghorn.errors import ConfigurationError
from pronghorn.ledger import STANDING, Kind, Ledger, counts

HTTP_TIMEOUT_S = 5.0
BETWEEN_LOOKS_S = 1.0
REPLICA_TITLE = "ServeReplica:pronghorn:"


class Report(msgspec.Struct, frozen=True):
    clean: bool
    at_rest: bool
    looks: int
    leftovers: list[Leftover]
    held: dict[str, dict[Kind, int]]
    """What each process holds, by name; kinds of which it holds nothing are left out."""


def verify(folder: RunFolder, wait_s: float) -> Report:
    """Raises ConfigurationError where no such cluster is ready here, Unavailable where its Redis does not answer."""
    run, state = folder.run(), folder.state()
    if run is None or state is None or state.redis_url is None:
        raise ConfigurationError(f"no cluster {folder.name!r} is ready on this machine")
    registry = RedisRegistry(state.redis_url, run.config.service.key_prefix)
    temp_dir = Path(run.temp_dir)
    return asyncio.run(audit(registry, lambda: replicas_of(processes.of_run(run.run_id, temp_dir)), wait_s))


async def audit(registry: NodeRegistry, replicas: Callable[[], dict[int, str]], wait_s: float) -> Report:
    """Look until all is clean, or `wait_s` have passed. `replicas` are the processes that should have a row: pid and
    title. Closes the registry."""
    give_up_s = time.monotonic() + wait_s
    before: list[Leftover] | None = None
    looks = 0
    try:
        async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as client:
            while True:
                look = await _look(registry, replicas, client)
                found, looks = leftovers(look), looks + 1
                if look.at_rest and not found:
                    return _report(look, [], looks)
                if before is not None and time.monotonic() >= give_up_s:
                    return _report(look, lasting(before, found), looks)
                before = found
                await asyncio.sleep(BETWEEN_LOOKS_S)
    finally:
        await registry.close()


def _report(look: Look, left: list[Leftover], looks: int) -> Report:
    held = {
        process.name: {kind: count for kind, count in counts(process.ledger.held).items() if count}
        for process in look.registered
        if process.ledger is not None
    }
    return Report(look.at_rest and not left, look.at_rest, looks, left, held)


async def _look(registry: NodeRegistry, replicas: Callable[[], dict[int, str]], client: httpx.AsyncClient) -> Look:
    rows: list[NodeRecord | OrchestratorRecord] = [*await registry.list(), *await registry.orchestrators.list()]
    registered = await asyncio.gather(*(_ask(row, client) for row in rows))
    return Look(list(registered), replicas())


async def _ask(row: NodeRecord | OrchestratorRecord, client: httpx.AsyncClient) -> Registered:
    role = row.role if isinstance(row, NodeRecord) else "orchestrator"
    unasked = Registered(row.name, role, row.incarnation, row.pid, None, "has no operations port")
    if row.operations_address is None:
        return unasked
    try:
        answer = await client.get(f"http://{row.operations_address}/internal/ledger")
        answer.raise_for_status()
        ledger = msgspec.json.decode(answer.content, type=Ledger)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        return replace(unasked, problem=f"does not answer at {row.operations_address}: {error!r}")
    if ledger.incarnation != row.incarnation:
        return replace(unasked, problem=f"another life answers at {row.operations_address}: {ledger.incarnation}")
    return replace(unasked, ledger=ledger, problem="")


def replicas_of(living: Iterable[psutil.Process]) -> dict[int, str]:
    """Pids and titles, on this machine. One that is being started has no row yet; it is left over until it has."""
    found = {}
    for process in living:
        words = processes.words_of(process)
        title = next((word for word in words if REPLICA_TITLE in word), None)
        if title is not None:
            found[process.pid] = title.removeprefix("ray::").split(".")[0]  # behind the dot: what it is doing
    return found


def show(report: Report, console: Console) -> None:
    table = Table("process", "requests hold", "and it holds", box=None)
    for name, held in report.held.items():
        ours = {kind: count for kind, count in held.items() if kind not in STANDING}
        table.add_row(name, _words(ours), _words({kind: held[kind] for kind in held.keys() - ours.keys()}))
    console.print(table)
    for left in report.leftovers:
        console.print(f"left over: {left}", highlight=False, soft_wrap=True)
    rest = "at rest" if report.at_rest else "not at rest"
    verdict = "clean" if report.clean else f"{len(report.leftovers)} leftovers"
    console.print(f"{rest}, {verdict} after {report.looks} looks", highlight=False)


def _words(held: dict[Kind, int]) -> str:
    return ", ".join(f"{held[kind]} {kind.value}" for kind in sorted(held)) or "nothing"
