"""Mixed load for a long time, one random fault after another, and the same proof at the end as of a scenario.

The next fault is drawn when the time for it has come and the cluster is whole again, so that what is struck is the
cluster and not its replacement in the making. The same seed draws the same faults, as long as it comes that far.
"""

import asyncio
import random
import time
from collections.abc import Callable

import msgspec

from cluster.chaos.fired import Fired
from cluster.chaos.footprint import footprints
from cluster.chaos.growth import Growth, Watch
from cluster.chaos.injector import Injector
from cluster.chaos.load import Asking, Body, Clients, RunningLoad, draw, undisturbed
from cluster.chaos.local_site import LocalSite
from cluster.chaos.recorder import Recorder, Verdict
from cluster.chaos.runner import AUDIT_S
from cluster.chaos.scenario import (
    Cut,
    Delay,
    Drain,
    Fault,
    Flip,
    ForgetPrefixes,
    Garbage,
    Kill,
    LeaveStorm,
    Load,
    Overload,
    RedisFlush,
    RedisKill,
    RedisPause,
    Reset,
    Stop,
    When,
    kind_of,
)
from cluster.chaos.site import POLL_S, Site
from pronghorn.tasks import Owner

LOAD = Load(
    streams=8,
    prompts=24,
    prompt_words=[3, 12, 30, 100],
    new_tokens=[1, 4, 16, 48],
    seeded=0.4,
    leaving=0.1,
    deadline_s=300.0,  # two nodes that are replaced at once on a busy machine are a minute or two
    retries=10,
)
SAMPLE_S = 3.0
WHOLE_S = 180.0
STOP_GRACE_S = 30.0
FRESH = 2
"""Clients whose prompts never come again, so that what is cached is driven out."""

NOW = When(s=0.0)
MENU: tuple[Callable[[random.Random], Fault], ...] = (
    lambda rng: Kill(at=NOW, process=rng.choice(("decode", "prefill"))),
    lambda rng: Kill(at=NOW, process=rng.choice(("decode-engine", "prefill-engine"))),
    lambda rng: Stop(at=NOW, process=rng.choice(("decode", "prefill")), for_s=rng.uniform(0.5, 6.0)),
    lambda rng: Cut(at=NOW, node=rng.choice(("decode", "prefill")), for_s=rng.uniform(2.0, 6.0)),
    lambda rng: Cut(at=NOW, node=rng.choice(("decode", "prefill")), for_s=3.0, ways="down"),
    lambda rng: Reset(at=NOW, node=rng.choice(("decode", "prefill"))),
    lambda rng: Delay(at=NOW, node=rng.choice(("decode", "prefill")), for_s=5.0, by_s=rng.uniform(0.02, 0.2)),
    lambda rng: Flip(at=NOW, node="prefill", offset=rng.randrange(200_000, 500_000)),  # blocks, which have digests
    lambda rng: Drain(at=NOW, node=rng.choice(("decode", "prefill")), grace_s=rng.uniform(0.0, 5.0)),
    lambda rng: LeaveStorm(at=NOW, requests=50, within_s=rng.uniform(0.1, 2.0)),
    lambda rng: Overload(at=NOW, times=4.0, for_s=5.0),
    lambda rng: Garbage(at=NOW, requests=50),
    lambda rng: ForgetPrefixes(at=NOW),
    lambda rng: RedisKill(at=NOW),
    lambda rng: RedisPause(at=NOW, for_s=rng.uniform(0.5, 5.0)),
    lambda rng: RedisFlush(at=NOW),
    lambda rng: Kill(at=NOW, process="orchestrator"),
)


class Soaked(msgspec.Struct, kw_only=True):
    seed: int
    minutes: float
    fired: list[Fired]
    requests: dict[Verdict, int]
    errors: dict[str, int]
    """By their code."""
    pieces: int
    leftovers: list[str]
    recovered_s: list[float]
    """After each fault."""
    growths: list[Growth]
    failures: list[str]


class Soak:
    def __init__(self, site: Site, minutes: float, every_s: float, seed: int, say: Callable[[str], None]) -> None:
        self._site = site
        self._minutes = minutes
        self._every_s = every_s
        self._seed = seed
        self._say = say
        self._rng = random.Random(f"{seed}/soak")
        self._watch = Watch()
        self._recovered_s: list[float] = []
        self._failures: list[str] = []

    async def run(self) -> Soaked:
        """Raises ServiceError where the cluster does not even answer undisturbed."""
        status = await self._site.status()
        bodies = draw(LOAD, self._seed)
        known: dict[Body, str] = {}
        await undisturbed(self._site.url, status.model, bodies, LOAD, known)
        clients = Clients(self._site.url, status.model, LOAD.deadline_s)
        asking = Asking(clients, Recorder(time.monotonic, forgets=True), LOAD, bodies, known, self._seed)
        load, injector = RunningLoad(asking, LOAD.streams, fresh=FRESH), Injector(self._site, asking)
        owner = Owner("soak")
        load.start()
        try:
            if isinstance(self._site, LocalSite):
                owner.start(self._look(asking.recorder, self._site), "watch what it takes")
            await self._strike_on(asking.recorder, injector)
            await load.end()
        finally:
            await load.stop()
            await owner.stop(STOP_GRACE_S)
            await clients.close()
        self._say("looking for what is left over")
        return self.came_to(asking.recorder, injector, await self._site.leftovers(AUDIT_S))

    async def _strike_on(self, recorder: Recorder, injector: Injector) -> None:
        before, end_s = await self._site.lives(), self._minutes * 60
        menu = [make for make in MENU if self._site.refusal(make(random.Random(0))) is None]
        due_s = self._every_s
        while recorder.since_s() < end_s:
            await asyncio.sleep(max(0.0, min(due_s, end_s) - recorder.since_s()))
            if recorder.since_s() >= end_s:
                return
            fault = self._rng.choice(menu)(self._rng)
            if isinstance(fault, Kill) and fault.process == "orchestrator" and before["orchestrator"] < 2:
                continue  # nobody would answer until its successor does
            if isinstance(fault, Flip):
                await self._site.forget_prefixes()  # so that blocks pass on the link
            self._say(f"{recorder.since_s():7.1f} s  {kind_of(fault)} {msgspec.json.encode(fault).decode()}")
            await injector.do(fault)
            over_s = recorder.since_s()
            while not await self._site.is_whole(before, injector.gone):
                if recorder.since_s() - over_s > WHOLE_S:
                    self._failures.append(f"it was not whole {WHOLE_S:g} s after {kind_of(fault)}")
                    return
                await asyncio.sleep(POLL_S)
            self._recovered_s.append(recorder.since_s() - over_s)
            due_s = max(due_s + self._every_s, recorder.since_s())

    async def _look(self, recorder: Recorder, site: LocalSite) -> None:
        while True:
            taken = await footprints(site)
            self._watch.see(recorder.since_s(), taken)
            await asyncio.sleep(SAMPLE_S)

    def came_to(self, recorder: Recorder, injector: Injector, left: list[str]) -> Soaked:
        requests = dict(recorder.verdicts())
        failures = [*self._failures, *injector.problems]
        for verdict in (Verdict.LOST, Verdict.DUPLICATED, Verdict.WRONG):
            if count := requests.get(verdict, 0):
                failures += [f"{count} requests were {verdict.value}", *recorder.told(verdict)]
        growths = self._watch.growths()
        failures += [f"left over: {one}" for one in left]
        failures += [
            f"{growth.title}, pid {growth.pid}, grew by {growth.per_minute:.2f} {growth.what} a minute, "
            f"{growth.bound:.2f} are allowed"
            for growth in growths
            if growth.is_clear
        ]
        return Soaked(
            seed=self._seed,
            minutes=recorder.since_s() / 60,
            fired=injector.fired,
            requests=requests,
            errors=dict(recorder.errors),
            pieces=recorder.pieces,
            leftovers=left,
            recovered_s=self._recovered_s,
            growths=growths,
            failures=failures,
        )
