"""One plan, run from start to end on virtual time, and the verdict on it.

    up -> load and faults -> every request ended -> faults undone -> at rest -> one more request each -> stopped

Knows the order and the bounds; what must hold is `invariants.py`'s to say. Invariant: the same plan gives the same
story, line for line.
"""

import asyncio
import gc
import logging
import time
import warnings
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from random import Random

from cluster.simulator import invariants
from cluster.simulator.clients import Outcome, begin
from cluster.simulator.faults import Faults
from cluster.simulator.hosts import DRAIN_S, Hosts, SimOrchestrator
from cluster.simulator.plan import Plan, RequestPlan
from cluster.simulator.story import Story
from cluster.simulator.virtual_loop import SimulationStuck, VirtualLoop
from orchestrator.explanation import RequestRecord

UP_WITHIN_S = 10.0
REST_WITHIN_S = 15.0
"""A lease, the longest retry of a session, a refresh after an outage of the registry, and some."""
REST_UNDISTURBED_S = 1.0
"""Where nothing was broken: what is cancelled is let go of within this."""
POLL_S = 0.05
PROBE_BUDGET_S = 8.0


@dataclass
class Verdict:
    plan: Plan
    violations: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    digest: str = ""
    endings: dict[str, int] = field(default_factory=dict)
    faults_fired: dict[str, int] = field(default_factory=dict)
    rest_took_s: float = 0.0
    """From the end of the last request and the last fault until everybody was at rest."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    late_frames: int = 0
    blocks_fetched: int = 0
    records: dict[str, RequestRecord] = field(default_factory=dict)
    """Of each request, why it went where it went, by its name: as its orchestrator kept it, the latest `KEPT`."""

    @property
    def ok(self) -> bool:
        return not self.violations


def run(plan: Plan) -> Verdict:
    """Never raises for what the simulated cluster does: that is a violation in the verdict."""
    began_s = time.perf_counter()
    verdict = Verdict(plan)
    loop = VirtualLoop(Random(f"order/{plan.seed}") if plan.perturbed else None)
    simulation = _Simulation(plan, loop, verdict)
    collecting = gc.isenabled()
    logging_was = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.disable()  # a collection would end abandoned coroutines at a moment of its own
    try:
        loop.run_until_complete(simulation.run())
    except SimulationStuck as stuck:
        verdict.violations.append(str(stuck))
    finally:
        _bury(loop)
        loop.close()
        logging.disable(logging_was)
        if collecting:
            gc.enable()
    verdict.wall_s = time.perf_counter() - began_s
    return verdict


def _bury(loop: VirtualLoop) -> None:
    """Let whatever is left end, the dead included: all has been judged by now."""
    loop.burying = True
    loop.set_exception_handler(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            left = asyncio.all_tasks(loop)
            if not left:
                return
            for task in left:
                task.cancel()
            try:
                loop.run_until_complete(asyncio.wait(left, timeout=5.0))
            except SimulationStuck:
                return


class _Simulation:
    def __init__(self, plan: Plan, loop: VirtualLoop, verdict: Verdict) -> None:
        self._plan = plan
        self._loop = loop
        self._verdict = verdict
        self._story = Story(loop)
        self._hosts = Hosts(plan, loop, Random(f"run/{plan.seed}"), self._story)
        self._hosts.on_orchestrator_death = self._lose
        self._faults = Faults(self._hosts)
        self._outcomes: list[Outcome] = []
        loop.set_exception_handler(self._on_loop_error)

    async def run(self) -> None:
        try:
            await self._phases()
        finally:
            verdict = self._verdict
            verdict.violations += invariants.said_by_processes(self._hosts)
            verdict.violations = list(dict.fromkeys(verdict.violations))
            for violation in verdict.violations:
                self._story.tell(f"VIOLATION {violation}")
            verdict.virtual_s = self._loop.time()
            self._story.tell(f"the end, after {self._loop.callbacks} callbacks")
            verdict.story = self._story.lines
            verdict.digest = self._story.digest()
            verdict.late_frames = self._hosts.network.late
            nodes = self._hosts.nodes
            verdict.blocks_fetched = sum(node.node.counters.value("blocks_fetched") for node in nodes)
            for fault in self._faults.fired:
                verdict.faults_fired[fault.kind] = verdict.faults_fired.get(fault.kind, 0) + 1
            for outcome in self._outcomes:
                if outcome.orchestrator is not None:
                    record = outcome.orchestrator.replica.explain(outcome.plan.name)
                    verdict.records |= {} if record is None else {outcome.plan.name: record}
                for how in outcome.ends:
                    verdict.endings[how] = verdict.endings.get(how, 0) + 1

    async def _phases(self) -> None:
        for name in self._plan.orchestrators:
            self._hosts.start_orchestrator(name)
        for node in self._plan.nodes:
            self._hosts.start_node(node)
        if not await self._rest("up", UP_WITHIN_S):
            return
        await self._load()
        self._faults.close()
        await self._until(lambda: self._faults.open == 0, 30.0)
        over_s = self._loop.time()
        at_rest = await self._rest("at rest", REST_WITHIN_S if self._plan.faults else REST_UNDISTURBED_S)
        self._verdict.rest_took_s = self._loop.time() - over_s
        if at_rest:
            await self._probe()
            await self._rest("at rest after one more request", REST_WITHIN_S)
        await self._stop()

    # --- load ---------------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        start_s = self._loop.time()
        for fault in self._plan.faults:
            self._faults.arm(fault, start_s)
        for request in self._plan.requests:
            self._loop.call_at(start_s + request.at_s, self._begin, request, context=Context())
        await self._ended(len(self._plan.requests), max((r.at_s for r in self._plan.requests), default=0.0))

    def _begin(self, plan: RequestPlan) -> None:
        outcome = Outcome(plan, self._story)
        self._outcomes.append(outcome)
        orchestrator = self._hosts.orchestrator(plan.orchestrator)
        if orchestrator is None:
            outcome.end("lost", self._loop.time())
            return
        begin(outcome, orchestrator)

    def _lose(self, orchestrator: SimOrchestrator) -> None:
        """Its clients see the connection break."""
        for outcome in self._outcomes:
            if outcome.orchestrator is orchestrator and not outcome.ends:
                outcome.end("lost", self._loop.time())

    async def _ended(self, count: int, last_at_s: float) -> None:
        """Wait for `count` outcomes in all, and judge those that are new."""
        longest_s = max((r.budget_s + r.read_delay_s * 20 for r in self._plan.requests), default=0.0)
        paused_s = sum(f.duration_s for f in self._plan.faults)
        bound_s = last_at_s + max(longest_s, PROBE_BUDGET_S) + paused_s + 2.0
        await self._until(lambda: len(self._outcomes) >= count and all(o.ends for o in self._outcomes), bound_s)
        for outcome in self._outcomes:
            if not outcome.ends:
                outcome.ends.append("hangs")
                self._verdict.violations.append(f"{outcome.plan.name} has not ended")
            else:
                self._verdict.violations += invariants.wrong_with_outcome(self._plan, outcome)

    async def _probe(self) -> None:
        """Whatever happened, the cluster serves again: one request to each orchestrator, which must succeed."""
        count = len(self._outcomes)
        can_serve = any(node.plan.role == "decode" for node in self._hosts.living())
        probes = []
        for orchestrator in [o for o in self._hosts.orchestrators if not o.gone]:
            if not can_serve:
                continue
            prompt = [7, 7, 7, 1, 2, 3, 4, 5]
            plan = RequestPlan(f"probe-{orchestrator.name}", 0.0, orchestrator.name, prompt, 4, PROBE_BUDGET_S)
            probes.append(Outcome(plan, self._story))
            self._outcomes.append(probes[-1])
            begin(probes[-1], orchestrator)
        await self._ended(count + len(probes), 0.0)
        for probe in probes:
            if probe.ends != ["finished"]:
                self._verdict.violations.append(f"{probe.plan.name} {probe.ends}: {probe.error!r}; all was healed")

    # --- rest ---------------------------------------------------------------------------------------------------------

    async def _rest(self, what: str, within_s: float) -> bool:
        found: list[str] = []
        deadline_s = self._loop.time() + within_s
        while True:
            found = invariants.wrong_at_rest(self._hosts) + await invariants.wrong_in_registry(self._hosts)
            if not found:
                self._story.tell(what)
                return True
            if self._loop.time() >= deadline_s:
                self._verdict.violations += [f"not {what} after {within_s} s: {line}" for line in found]
                return False
            await asyncio.sleep(POLL_S)

    async def _until(self, condition: Callable[[], bool], within_s: float) -> bool:
        deadline_s = self._loop.time() + within_s
        while not condition():
            if self._loop.time() >= deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _stop(self) -> None:
        stopping = []
        for orchestrator in [o for o in self._hosts.orchestrators if not o.gone]:
            stopping.append(orchestrator.process.start(_leave(orchestrator), "stop"))
        for node in self._hosts.living():
            stopping.append(node.process.start(self._hosts.drain(node), "stop"))
        if stopping:
            await asyncio.wait(stopping, timeout=DRAIN_S + 20.0)
        await asyncio.sleep(1.0)
        self._verdict.violations += invariants.wrong_at_the_end(self._hosts)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self._verdict.violations.append(f"{context.get('message')}: {error!r}")


async def _leave(orchestrator: SimOrchestrator) -> None:
    await orchestrator.replica.drain()
    await orchestrator.replica.stop()
