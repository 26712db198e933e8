"""What any client can do to a cluster: leave, ask for too much at once, ask for nonsense."""

import asyncio
import random

from cluster.chaos.fired import Proofs
from cluster.chaos.garbage import refused_well, wrong_body
from cluster.chaos.load import Asking, RunningLoad
from cluster.chaos.recorder import Verdict
from cluster.chaos.scenario import Garbage, LeaveStorm, Overload
from cluster.chaos.site import Site
from pronghorn.errors import Unavailable


class ClientFaults:
    def __init__(self, site: Site, asking: Asking, proofs: Proofs, problems: list[str]) -> None:
        """What is answered otherwise than it should be is added to `problems`."""
        self._site = site
        self._asking = asking
        self._proofs = proofs
        self._problems = problems
        self._recorder = asking.recorder
        self._rng = random.Random(f"{asking.seed}/faults")

    async def leave_storm(self, fault: LeaveStorm) -> None:
        stays_s = [self._rng.uniform(0.0, fault.within_s) for _ in range(fault.requests)]
        fired = self._proofs.of(fault, "any", "")
        asked = (self._asking.ask(number, extra=True, stay_s=stay_s) for number, stay_s in enumerate(stays_s))
        left = sum(request.verdict() is Verdict.LEFT for request in await asyncio.gather(*asked))
        fired.ended_s = self._recorder.since_s()
        fired.seen = f"{left} of {fault.requests} clients had gone before their end"
        if left == 0:
            raise Unavailable("every request ended before its client left")

    async def overload(self, fault: Overload) -> None:
        streams = max(1, round(self._asking.load.streams * fault.times))
        extra = RunningLoad(self._asking, streams, extra=True)
        fired = self._proofs.of(fault, "any", "")
        extra.start()
        try:
            await asyncio.sleep(fault.for_s)
            await extra.end()
        finally:
            await extra.stop()
            fired.ended_s = self._recorder.since_s()
        fired.seen = f"{streams} streams more; {extra.refused} of {extra.asked} askings were told to come back later"

    async def garbage(self, fault: Garbage) -> None:
        model = (await self._site.status()).model
        fired = self._proofs.of(fault, "any", "")
        kinds: list[str] = []
        for number in range(fault.requests):
            name, body = wrong_body(self._rng, model, number)
            answer = await self._site.http.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            kinds.append(name)
            if not refused_well(answer):
                self._problems.append(f"garbage ({name}) was answered {answer.status_code}: {answer.text[:200]}")
        fired.ended_s = self._recorder.since_s()
        fired.seen = f"{len(kinds)} requests of {len(set(kinds))} kinds were sent"
