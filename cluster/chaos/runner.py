"""One scenario on one cluster: load, faults, recovery, audit, and what it came to.

In this order: every prompt is asked undisturbed; the load begins; each fault strikes at its moment; when all are over
the cluster must become whole; the load ends, each request by itself; when the cluster is at rest its ledger is audited.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from cluster.chaos.fired import Fired
from cluster.chaos.injector import Injector
from cluster.chaos.load import Asking, Body, Clients, RunningLoad, draw, undisturbed
from cluster.chaos.recorder import Recorder, Request, Verdict
from cluster.chaos.scenario import NEEDS, Cluster, Scenario
from cluster.chaos.site import POLL_S, Site
from pronghorn.errors import ServiceError, Unavailable
from pronghorn.tasks import Owner

AUDIT_S = 120.0
"""For work to end and nodes to be replaced, before what is held counts as left over."""
STOP_GRACE_S = 30.0
SETTLE_S = 180.0
"""How long a cluster may take to be as a scenario needs it."""


class Outcome(msgspec.Struct, kw_only=True):
    scenario: str
    seed: int
    refused: str | None = None
    """Why it was not run here; nothing else is known then."""
    broken_off: bool = False
    """It did not come to its end: the cluster did not even answer."""
    faults: int = 0
    fired: list[Fired] = []
    requests: dict[Verdict, int] = {}
    extra_requests: dict[Verdict, int] = {}
    """Of the faults' own loads."""
    asked_again: int = 0
    """Tries beyond each request's first."""
    leftovers: list[str] = []
    recovered_s: float | None = None
    """From the end of the last fault until the cluster was whole; None where it was not, or nothing was done to it."""
    first_token_p50_s: float | None = None
    first_token_p99_s: float | None = None
    longest_gap_s: float = 0.0
    wall_s: float = 0.0
    failures: list[str] = []
    """What does not hold; empty: all does."""

    def total(self, verdict: Verdict) -> int:
        return self.requests.get(verdict, 0) + self.extra_requests.get(verdict, 0)

    @property
    def count(self) -> int:
        return sum(self.requests.values()) + sum(self.extra_requests.values())

    @property
    def ok(self) -> bool:
        return not self.failures


class Runner:
    """Scenarios on one cluster, one after another; what it says undisturbed is asked once for each prompt."""

    def __init__(self, site: Site, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._site = site
        self._seed = seed
        self._say = say
        self._known: dict[Body, str] = {}
        self._size: Cluster | None = None
        """Of the cluster, when it was first looked at."""
        self.requests: list[Request] = []
        """Of the scenario that was run last, with their timelines."""

    async def refusal(self, scenario: Scenario) -> str | None:
        """Why it cannot be run on this cluster; None where it can."""
        if scenario.needs:
            return "; ".join(f"it needs {need}, and {NEEDS[need]}" for need in scenario.needs)
        for fault in scenario.faults:
            if refused := self._site.refusal(fault):
                return refused
        self._size = self._size or await self._site.size()
        return shortage(scenario.cluster, self._size)

    async def run(self, scenario: Scenario) -> Outcome:
        """What the cluster cannot even do undisturbed is a failure of the scenario."""
        began_s = time.monotonic()
        outcome = Outcome(scenario=scenario.name, seed=self._seed, faults=len(scenario.faults))
        self.requests = []
        try:
            outcome.refused = await self.refusal(scenario)
            if outcome.refused is None:
                await self._settled(scenario.cluster)
                outcome = await self._run(scenario)
        except ServiceError as error:
            outcome.broken_off = True
            outcome.failures.append(f"it did not come to its end: {error.message}")
        outcome.wall_s = time.monotonic() - began_s
        return outcome

    async def _settled(self, wanted: Cluster) -> None:
        """The scenario before may have left it smaller. Raises Unavailable where it stays so."""
        give_up_s = time.monotonic() + SETTLE_S
        while True:
            try:
                short = shortage(wanted, await self._site.size())
            except Unavailable as error:
                short = error.message
            if short is None:
                return
            if time.monotonic() > give_up_s:
                raise Unavailable(f"{short}, {SETTLE_S:g} s after the scenario before")
            await asyncio.sleep(POLL_S)

    async def _run(self, scenario: Scenario) -> Outcome:
        status = await self._site.status()
        bodies = draw(scenario.load, self._seed)
        self._say(f"{scenario.name}: asking {len(bodies)} prompts undisturbed")
        await undisturbed(self._site.url, status.model, bodies, scenario.load, self._known)
        await self._site.forget_prefixes()
        before = await self._site.lives()
        clients = Clients(self._site.url, status.model, scenario.load.deadline_s)
        try:
            asking = Asking(clients, Recorder(time.monotonic), scenario.load, bodies, self._known, self._seed)
            outcome = await _Run(scenario, self._site, asking, before, self._say).run()
        finally:
            await clients.close()
            self.requests = asking.recorder.requests
        return outcome


class _Run:
    """One scenario on one cluster, once."""

    def __init__(
        self, scenario: Scenario, site: Site, asking: Asking, before: Counter[str], say: Callable[[str], None]
    ) -> None:
        self._scenario = scenario
        self._site = site
        self._seed = asking.seed
        self._before = before
        self._say = say
        self._recorder = asking.recorder
        self._load = RunningLoad(asking, scenario.load.streams)
        self._injector = Injector(site, asking)
        self._owner = Owner(f"scenario {scenario.name}")
        self._recovered_s: float | None = None
        self._failures: list[str] = []

    async def run(self) -> Outcome:
        self._say(f"{self._scenario.name}: {self._scenario.load.streams} streams, {len(self._scenario.faults)} faults")
        self._load.start()
        try:
            self._owner.start(self._watch(), "watch")
            await self._faults()
            await self._recover()
            await self._enough()
            await self._load.end()
        finally:
            await self._load.stop()
            await self._owner.stop(STOP_GRACE_S)  # what is stopped or cut goes on
        self._say(f"{self._scenario.name}: looking for what is left over")
        left = await self._site.leftovers(AUDIT_S)
        return self._outcome(left)

    async def _faults(self) -> None:
        tasks = [
            self._owner.start(self._injector.do(fault), f"fault {number}")
            for number, fault in enumerate(self._scenario.faults)
        ]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._scenario.limit_s)
        if late:
            self._failures.append(f"{len(late)} faults were not over within {self._scenario.limit_s:g} s")
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error

    async def _recover(self) -> None:
        if not self._scenario.faults:
            return
        over_s = max((fired.ended_s or fired.at_s for fired in self._injector.fired), default=self._recorder.since_s())
        limit_s = self._scenario.checks.recovered_within_s
        while not await self._site.is_whole(self._before, self._injector.gone):
            if self._recorder.since_s() - over_s > limit_s:
                self._failures.append(f"it was not whole {limit_s:g} s after the last fault")
                return
            await asyncio.sleep(POLL_S)
        self._recovered_s = max(0.0, self._recorder.since_s() - over_s)

    async def _enough(self) -> None:
        least = self._scenario.load.requests
        try:
            async with asyncio.timeout(self._scenario.limit_s):
                await self._recorder.until(lambda: self._recorder.ended >= least)
        except TimeoutError:
            self._failures.append(f"{self._recorder.ended} of {least} requests had ended after all")

    async def _watch(self) -> None:
        """When the cluster itself noticed what was done to it."""
        while True:
            unnoticed = [f for f in self._injector.fired if f.is_of_node and f.noticed_s is None]
            if unnoticed:
                with suppress(Unavailable):
                    lives = (await self._site.status()).lives()
                    for fired in unnoticed:
                        if fired.incarnation not in lives:
                            fired.noticed_s = self._recorder.since_s()
            await asyncio.sleep(POLL_S)

    def _outcome(self, left: list[str]) -> Outcome:
        recorder, firsts = self._recorder, self._recorder.first_token_s()
        outcome = Outcome(
            scenario=self._scenario.name,
            seed=self._seed,
            faults=len(self._scenario.faults),
            fired=self._injector.fired,
            requests=dict(recorder.verdicts(extra=False)),
            extra_requests=dict(recorder.verdicts(extra=True)),
            asked_again=sum(max(0, len(request.tries) - 1) for request in recorder.requests),
            leftovers=left,
            recovered_s=self._recovered_s,
            first_token_p50_s=_quantile(firsts, 0.5),
            first_token_p99_s=_quantile(firsts, 0.99),
            longest_gap_s=recorder.longest_gap_s(),
            failures=[*self._failures, *self._injector.problems],
        )
        outcome.failures += failures(self._scenario, outcome)
        for verdict in (Verdict.LOST, Verdict.DUPLICATED, Verdict.WRONG):
            outcome.failures += recorder.told(verdict)
        if self._scenario.checks.errors is not None and outcome.requests.get(Verdict.ERROR, 0):
            outcome.failures += recorder.told(Verdict.ERROR)
        return outcome


def shortage(wanted: Cluster, there: Cluster) -> str | None:
    """What there is too little of; None where all is enough. Pure."""
    for pool in Cluster.__struct_fields__:
        least, has = getattr(wanted, pool), getattr(there, pool)
        if has < least:
            nodes = pool if pool in ("orchestrators", "machines") else f"{pool} nodes"
            return f"it needs {least} {nodes}, and the cluster has {has}"
    return None


def failures(scenario: Scenario, outcome: Outcome) -> list[str]:
    """What of its checks, and of those that always hold, does not. Pure."""
    found = []
    struck = sum(getattr(fault, "count", 1) for fault in scenario.faults)
    if len(outcome.fired) < struck:
        found.append(f"{len(outcome.fired)} of {struck} faults fired")
    for verdict in (Verdict.LOST, Verdict.DUPLICATED, Verdict.WRONG):
        if count := outcome.total(verdict):
            found.append(f"{count} requests were {verdict.value}")
    errors, allowed = outcome.requests.get(Verdict.ERROR, 0), scenario.checks.errors
    if allowed is not None and errors > allowed:
        found.append(f"{errors} requests ended in an error, {allowed} may")
    gap_s = scenario.checks.longest_gap_s
    if gap_s is not None and outcome.longest_gap_s > gap_s:
        found.append(f"a stream said nothing for {outcome.longest_gap_s:.2f} s, {gap_s:g} s are allowed")
    return found + [f"left over: {left}" for left in outcome.leftovers]


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
