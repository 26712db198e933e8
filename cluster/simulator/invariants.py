"""What must hold, whatever happened: of every request, of everybody at rest, of everybody at the end.

Pure: looks, and returns what is wrong in words. Nothing here waits or changes anything.
"""

from collections.abc import Iterable

from cluster.simulator.clients import Outcome
from cluster.simulator.hosts import Hosts, SimNode, SimOrchestrator
from cluster.simulator.plan import BLOCK_TOKENS, RECEIVER, SENDER, Fault, FaultKind, Plan
from kvcache.directory import KEY_BYTES
from kvcache.hashing import index_keys
from pipelines.runtime.batching import blocks_for
from pipelines.types.frames import POISONOUS_DEATHS
from pronghorn.errors import (
    ClientError,
    DeadlineExceeded,
    EndpointNotFound,
    InsufficientBlocks,
    InternalError,
    Overloaded,
    PoisonRequest,
    PronghornError,
    Unavailable,
)
from pronghorn.ledger import STANDING
from pronghorn.wire import FETCH_METHOD, PREFILL_METHOD, SESSION_METHOD

LATE_S = 0.5
"""How much later than its deadline a request may end: the turns that its last word takes."""
AT_REST = (
    *("life", "rounds", "registration", "sweep", "engine-reports", "idle-channels", "peers", "directory", "seed"),
    "offload",
    *(f"call-{SESSION_METHOD}", "reader", "writer", "registry", "registry-changes", "silence"),
)
"""The tasks of a node or orchestrator that holds no request; beside those of its sessions."""

HARMLESS = {
    *(FaultKind.TAMPER, FaultKind.REDIS_AWAY, FaultKind.REDIS_FLUSHED, FaultKind.DROP_CACHES, FaultKind.JOIN),
}
DEADLY = {
    *(FaultKind.KILL, FaultKind.KILL_ENGINE, FaultKind.PAUSE, FaultKind.PAUSE_SHELL, FaultKind.PAUSE_ENGINE),
    *(FaultKind.BREAK, FaultKind.CUT, FaultKind.CUT_BOTH),
}
"""What may be taken for the death of a node: a connection that breaks looks the same until the node is heard of."""
FROM_ORCHESTRATOR = {(SENDER, "submit"), (SENDER, "abort"), (RECEIVER, "outputs")}
FROM_PREFILL = {(SENDER, moment) for moment in ("first_token", "blocks", "commit")} | {(RECEIVER, "ask")}


# --- requests ---------------------------------------------------------------------------------------------------------


def wrong_with_outcome(plan: Plan, outcome: Outcome) -> list[str]:
    name, answers = outcome.plan.name, outcome.answers
    found = []
    if len(outcome.ends) != 1:
        return [f"{name} ended {len(outcome.ends)} times: {outcome.ends}"]
    for choice, answer in enumerate(answers):
        said = outcome.said.get(choice, [])
        if said != answer[: len(said)]:
            found.append(f"{name}, choice {choice}, got {said}, not the beginning of {answer}")
    how, tokens = outcome.ends[0], sum(map(len, answers))
    if how == "finished" and (len(outcome.tokens) != tokens or len(outcome.done) != len(answers)):
        found.append(f"{name} finished with {len(outcome.tokens)} of {tokens} tokens, {len(outcome.done)} choices done")
    if how == "cancelled" and outcome.plan.cancel_after_s is None:
        found.append(f"{name} was cancelled, and its client never left")
    if how == "failed" and not _excused(plan, outcome):
        found.append(f"{name} failed without an excuse: {outcome.error!r}")
    if outcome.orchestrator is not None and how != "lost":
        paused_s = outcome.orchestrator.paused_s - outcome.paused_s
        reading_s = outcome.plan.read_delay_s * (tokens + len(answers))
        allowed_s = outcome.plan.budget_s + paused_s + reading_s + LATE_S
        if outcome.ended_s - outcome.started_s > allowed_s:
            took_s = outcome.ended_s - outcome.started_s
            found.append(f"{name} took {took_s:.3f} s, with a deadline of {outcome.plan.budget_s:.3f} s")
    return found


def _excused(plan: Plan, outcome: Outcome) -> bool:
    """Whether the plan's faults and bounds explain that error."""
    error = outcome.error
    serious = any(not harmless(plan, fault) for fault in plan.faults)
    match error:
        case None | InternalError():
            return False
        case EndpointNotFound():
            return outcome.plan.target_endpoint is not None and bool(plan.faults)
        case ClientError():
            return False
        case Overloaded():
            return _crowded(plan)
        case DeadlineExceeded() | Unavailable(code="deadline_out_of_reach"):
            slow = any(fault.kind is FaultKind.SLOW for fault in plan.faults)
            return outcome.plan.budget_s < GENEROUS_S or slow or (bool(plan.faults) and not _another_can(plan))
        case PoisonRequest():
            return sum(fault.kind in DEADLY for fault in plan.faults) >= POISONOUS_DEATHS
        case InsufficientBlocks():
            needed = blocks_for(len(outcome.plan.prompt) + outcome.plan.new_tokens, BLOCK_TOKENS)
            return needed > min(n.num_blocks for n in plan.nodes)
        case PronghornError():
            if outcome.plan.target_endpoint is not None:
                return bool(plan.faults)
            # A stream waits for a node: whatever was broken is whole again before its budget is spent.
            return serious and not outcome.tokens and not _another_can(plan)


def _another_can(plan: Plan) -> bool:
    """Whether a request must be served by another decode node, in mid-stream as well: one fault, and not on an
    orchestrator."""
    if len(plan.faults) != 1 or plan.max_attempts < 2:
        return False
    fault = plan.faults[0]
    on_orchestrator = fault.target in plan.orchestrators or (fault.target, fault.moment) in FROM_ORCHESTRATOR
    return not on_orchestrator and sum(n.role == "decode" for n in plan.nodes) >= 2


GENEROUS_S = 10.0
"""A budget that is enough where nothing is broken."""


def _crowded(plan: Plan) -> bool:
    count = sum(request.choices for request in plan.requests)
    bounds = [plan.max_in_flight + plan.max_queue, *(n.max_waiting for n in plan.nodes)]
    return count >= min([*bounds, *(n.max_in_flight for n in plan.nodes)])


def harmless(plan: Plan, fault: Fault) -> bool:
    """Whether every request must be served in spite of it: it touches prefill nodes, caches or the registry alone."""
    if fault.kind in HARMLESS:
        return True
    prefill = {n.name for n in plan.nodes if n.role == "prefill"}
    places = [p for p in (fault.target, fault.other) if p]
    return any(p in prefill or (fault.moment is not None and (p, fault.moment) in FROM_PREFILL) for p in places)


# --- at rest ----------------------------------------------------------------------------------------------------------


def wrong_at_rest(hosts: Hosts) -> list[str]:
    """Everything that somebody still holds, though no request is left."""
    found = [f"{hosts.replacing} nodes are being replaced"] if hosts.replacing else []
    for node in hosts.living():
        found += _node_at_rest(hosts, node)
    for orchestrator in _living(hosts):
        found += _orchestrator_at_rest(hosts, orchestrator)
    if streams := hosts.network.open_streams(PREFILL_METHOD):
        found.append(f"{len(streams)} hand-overs are open")
    if streams := hosts.network.open_streams(FETCH_METHOD):
        found.append(f"{len(streams)} fetches are open")
    return found


async def wrong_in_registry(hosts: Hosts) -> list[str]:
    rows = {row.incarnation for row in await hosts.redis.rows.list()}
    living = {node.node.shell.incarnation for node in hosts.living()}
    found = [line for node in hosts.living() if (line := await _wrong_in_directory(hosts, node))]
    return found + (
        [] if rows == living else [f"the registry has {len(rows - living)} dead lives, and lacks {len(living - rows)}"]
    )


async def _wrong_in_directory(hosts: Hosts, node: SimNode) -> str | None:
    if not (hosts.plan.directory and hosts.plan.prefix_caching):
        return None
    ours = node.node.shell.incarnation
    told = {key for life, keys in [run async for run in hosts.redis.directory.rows()] if life == ours for key in keys}
    truth = {block_hash[:KEY_BYTES] for block_hash in node.engine.cached_hashes()}
    return None if told == truth else f"the directory has {len(told)} blocks of {node.host}, which has {len(truth)}"


def _node_at_rest(hosts: Hosts, node: SimNode) -> list[str]:
    found = []
    load = node.engine.scheduler.load()
    if node.node.in_flight:
        found.append(f"{node.host} holds {node.node.in_flight} attempts")
    if load.held_blocks or load.waiting or load.running or load.awaiting_blocks:
        found.append(f"{node.host}'s engine is not at rest: {load}")
    if held := node.node.shell.exchange.held():
        found.append(f"{node.host} holds {len(held)} leases and imports")
    if (wrong := _cache_told(node)) is not None:
        found.append(wrong)
    if (reason := node.node.shell.unhealthy_reason()) is not None:
        found.append(f"{node.host} is unhealthy: {reason}")
    rows = node.node.held(0.0) + node.engine.scheduler.held(0.0)
    found += [f"{node.host} holds {row}" for row in rows if row.kind not in STANDING]
    tasks = [name for process in node.processes for name in hosts.loop.tasks_of(process)]
    found += _strange_tasks(node.host, tasks)
    sessions = sum(name.endswith(f"call-{SESSION_METHOD}") for name in tasks)
    if sessions != len(_living(hosts)):
        found.append(f"{node.host} has {sessions} sessions with {len(_living(hosts))} orchestrators")
    return found


def _cache_told(node: SimNode) -> str | None:
    """What the shell says is cached is what its engine could find."""
    told = {block_hash for run in node.node.shell.contents.runs(1) for block_hash in run.hashes}
    truth = node.engine.cached_hashes()
    return None if told == truth else f"{node.host} tells of {len(told)} cached blocks, and has {len(truth)}"


def _orchestrator_at_rest(hosts: Hosts, orchestrator: SimOrchestrator) -> list[str]:
    found = _strange_tasks(orchestrator.name, hosts.loop.tasks_of(orchestrator.process))
    replica = orchestrator.replica
    if replica.in_flight():
        found.append(f"{orchestrator.name} has {replica.in_flight()} requests in flight")
    found += [f"{orchestrator.name} holds {row}" for row in replica.held() if row.kind not in STANDING]
    try:
        replica.dispatcher.check()
    except AssertionError as error:
        found.append(f"{orchestrator.name}: {error!r}")
    views = {view.incarnation: view for view in replica.views()}
    for node in hosts.living():
        view = views.pop(node.node.shell.incarnation, None)
        if view is None or view.unusable is not None:
            found.append(f"{orchestrator.name} cannot use {node.host}: {view.unusable if view else 'not known'}")
        elif view.in_flight or view.waiting:
            found.append(f"{orchestrator.name} counts {view.in_flight} in flight on {node.host}")
        found += _wrong_in_index(orchestrator, node)
    found += [f"{orchestrator.name} still knows {view.name}, which is gone" for view in views.values()]
    return found


def _wrong_in_index(orchestrator: SimOrchestrator, node: SimNode) -> list[str]:
    """What is known of the node's cache is what it says of it: of its pool, and of each tier."""
    shell, holdings, found = node.node.shell, orchestrator.replica.holdings, []
    for tier, contents in {"pool": shell.contents, **shell.kept}.items():
        dump = holdings.dump() if tier == "pool" else holdings.dump_kept(tier)
        known = dump.get(shell.incarnation, set())
        truth = {key for run in contents.runs(256) for key in memoryview(index_keys(run.hashes)).cast("Q")}
        if known != truth:
            found.append(f"{orchestrator.name} knows {len(known)} blocks of {node.host}'s {tier}, of {len(truth)}")
    return found


def _strange_tasks(host: str, names: Iterable[str]) -> list[str]:
    strange = [n for n in names if n.rsplit("/", 1)[-1] not in AT_REST and not _of_a_session(n)]
    return [f"{host} still runs {', '.join(strange)}"] if strange else []


def _of_a_session(name: str) -> bool:
    return name.endswith(SESSION_METHOD) or name.rsplit("/", 1)[-1].startswith("session-")


def _living(hosts: Hosts) -> list[SimOrchestrator]:
    return [o for o in hosts.orchestrators if not o.gone]


# --- bugs that say so themselves --------------------------------------------------------------------------------------


def said_by_processes(hosts: Hosts) -> list[str]:
    found = [bug for node in hosts.nodes for bug in node.engine.bugs]
    found += [f"{process.name}: {failure}" for process in hosts.processes() for failure in process.failures]
    for orchestrator in hosts.orchestrators:
        if (failed := orchestrator.replica.failure()) is not None:
            found.append(f"{orchestrator.name}: {failed!r}")
    return found


def wrong_at_the_end(hosts: Hosts) -> list[str]:
    """After everybody has stopped in good order."""
    found = []
    for process in [*(p for n in hosts.nodes for p in n.processes), *(o.process for o in hosts.orchestrators)]:
        if process.alive and (tasks := hosts.loop.tasks_of(process)):
            found.append(f"{process.name} has stopped, and still runs {', '.join(tasks)}")
    methods = (SESSION_METHOD, PREFILL_METHOD, FETCH_METHOD)
    if streams := [stream for method in methods for stream in hosts.network.open_streams(method)]:
        found.append(f"{len(streams)} streams are open after everybody has stopped")
    return found
