"""Clients that ask one thing after another of a cluster while it changes under them; all is told to a recorder.

A body is drawn from a seed and no model is assumed: prompts are words. What a client reads is the stream of
`/v1/completions`: an answer has one end, its length in tokens, and `[DONE]`.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from cluster.chaos.recorder import ANSWERED, BROKEN, LATE, LEFT, Recorder, Request, Try, Verdict
from cluster.chaos.scenario import Load
from pronghorn.errors import ServiceError
from pronghorn.tasks import Owner

WORDS = (
    "amber anchor autumn basket beacon bridge candle canyon castle cellar cinder circle copper cotton dancer desert "
    "dragon ember engine falcon feather forest garden glacier harbor hollow island jacket kettle ladder lantern lemon "
    "marble meadow mirror mountain needle ocean orchard paper pepper pilot planet prairie puzzle quarry raven ribbon "
    "river rocket saddle shadow silver spider station summer temple thunder timber tunnel valley velvet violin walnut "
    "water whisper window winter wonder yellow zephyr"
).split()
SEND_AGAIN_S = 1.0
"""How long a client waits that was told no time."""
MOST_AGAIN_S = 5.0
END_S = 10.0
REFUSED = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)


class Body(msgspec.Struct, frozen=True):
    prompt: str
    new_tokens: int
    seed: int | None
    """None: greedy."""

    def asked(self, model: str) -> dict[str, Any]:
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **drawn,
        }


def draw(load: Load, seed: int) -> list[Body]:
    rng = random.Random(seed)
    return [drawn(load, rng) for _ in range(load.prompts)]


def drawn(load: Load, rng: random.Random) -> Body:
    words = " ".join(rng.choices(WORDS, k=rng.choice(load.prompt_words)))
    seed = rng.randrange(2**31) if rng.random() < load.seeded else None
    return Body(words, rng.choice(load.new_tokens), seed)


class Clients:
    """One connection for each request, so that no broken one is taken for another's."""

    def __init__(
        self, url: str, model: str, deadline_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`transport`: None is the network."""
        self._model = model
        self._deadline_s = deadline_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=deadline_s, limits=limits, trust_env=False, transport=transport
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self, recorder: Recorder, request: Request, body: Body, *, retries: int, stay_s: float | None
    ) -> None:
        """Asks, and asks again at most `retries` times; leaves after `stay_s`, where that is not None."""
        try:
            async with asyncio.timeout(self._deadline_s):
                for number in range(retries + 1):
                    one = recorder.sent(request)
                    again_s = await self._once(recorder, one, body, stay_s)
                    if again_s is None or number == retries:
                        return
                    await asyncio.sleep(again_s)
        except TimeoutError:
            recorder.end_try(request.tries[-1], LATE, note=f"not ended within {self._deadline_s:g} s")
        finally:
            recorder.end(request)

    async def _once(self, recorder: Recorder, one: Try, body: Body, stay_s: float | None) -> float | None:
        """How long to wait before asking again; None: it has ended for good."""
        reading = _Reading(recorder, one, body)
        try:
            async with asyncio.timeout(stay_s) as stay:
                async with self._client.stream("POST", "/v1/completions", json=body.asked(self._model)) as response:
                    await reading.read(response)
        except TimeoutError:
            if not stay.expired():
                raise
            recorder.end_try(one, LEFT)
        except (httpx.HTTPError, json.JSONDecodeError, LookupError, TypeError) as error:
            recorder.end_try(one, BROKEN, note=repr(error))
            return SEND_AGAIN_S
        return reading.again_s


class _Reading:
    """One answer, piece by piece."""

    def __init__(self, recorder: Recorder, one: Try, body: Body) -> None:
        self.again_s: float | None = None
        self._recorder = recorder
        self._one = one
        self._body = body
        self._ends: list[str] = []
        self._tokens: int | None = None
        self._how: str | None = None
        self._note = ""

    async def read(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK:
            error = json.loads(await response.aread())["error"]
            if response.status_code in REFUSED:
                told = float(response.headers.get("retry-after", SEND_AGAIN_S))
                self.again_s = min(told, MOST_AGAIN_S)
            self._recorder.end_try(self._one, str(error["code"]), response.status_code, str(error["message"]))
            return
        done = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
        how, note = self._how, self._note
        if how is None:
            note = self._unended(done)
            how = BROKEN if note else ANSWERED
            self.again_s = SEND_AGAIN_S if note else None
        self._recorder.end_try(self._one, how, response.status_code, note)

    def _take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self._how, self._note = str(event["error"]["code"]), str(event["error"]["message"])
            return
        usage = event.get("usage")
        self._tokens = usage["completion_tokens"] if usage else self._tokens
        for choice in event["choices"]:
            if choice["text"]:
                self._recorder.heard(self._one, choice["text"])
            if choice["finish_reason"]:
                self._ends.append(choice["finish_reason"])

    def _unended(self, done: int) -> str:
        """Why the stream has not ended as it must; empty where it has."""
        if (self._ends, done) != (["length"], 1):
            return f"the stream broke off: finish reasons {self._ends}, [DONE] {done} times"
        if self._tokens != self._body.new_tokens:
            return f"{self._tokens} tokens where {self._body.new_tokens} were asked for"
        return ""


async def undisturbed(url: str, model: str, bodies: list[Body], load: Load, known: dict[Body, str]) -> None:
    """Asks each of `bodies` that is not `known`, and puts its text there. Raises ServiceError where one has none."""
    recorder = Recorder(asyncio.get_running_loop().time)
    clients, slots = Clients(url, model, load.deadline_s), asyncio.Semaphore(load.streams)

    async def one(number: int, body: Body) -> None:
        async with slots:
            request = recorder.open(number, "")
            await clients.ask(recorder, request, body, retries=0, stay_s=None)
            last = request.tries[-1]
            if last.how != ANSWERED:
                raise ServiceError(
                    f"before anything was done, prompt {number} was not answered: {last.how} {last.note}"
                )
            known[body] = last.text

    try:
        await asyncio.gather(*(one(n, body) for n, body in enumerate(bodies) if body not in known))
    finally:
        await clients.close()


@dataclass(frozen=True)
class Asking:
    """What is asked, who asks it, and who hears of it."""

    clients: Clients
    recorder: Recorder
    load: Load
    bodies: list[Body]
    known: Mapping[Body, str]
    """The undisturbed texts of `bodies`."""
    seed: int

    async def ask(self, number: int, *, extra: bool, retries: int = 0, stay_s: float | None = None) -> Request:
        """The body of that number, of which there are as many as anybody counts."""
        at = number % len(self.bodies)
        body = self.bodies[at]
        request = self.recorder.open(at, self.known[body], extra)
        await self.clients.ask(self.recorder, request, body, retries=retries, stay_s=stay_s)
        return request

    async def ask_twice(self, body: Body) -> None:
        """One that nobody knows: what is said at first is what must be said then."""
        first = self.recorder.open(len(self.bodies), None)
        await self.clients.ask(self.recorder, first, body, retries=self.load.retries, stay_s=None)
        if first.verdict() is Verdict.ANSWERED:
            again = self.recorder.open(len(self.bodies), first.tries[-1].text)
            await self.clients.ask(self.recorder, again, body, retries=self.load.retries, stay_s=None)


class RunningLoad:
    """`streams` clients from `start` to `end`, and `fresh` more, whose prompts never come again. `extra`: it is of a
    fault, and not of the scenario."""

    def __init__(self, asking: Asking, streams: int, extra: bool = False, fresh: int = 0) -> None:
        self.asked = self.refused = 0
        """Tries of the `streams` that have ended, and those that were told to come back later."""
        self._asking = asking
        self._streams = streams
        self._fresh = fresh
        self._extra = extra
        self._ending = False
        self._owner = Owner("load")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [self._owner.start(self._client(n), f"client {n}") for n in range(self._streams)]
        self._tasks += [self._owner.start(self._fresh_client(n), f"fresh client {n}") for n in range(self._fresh)]

    async def end(self) -> None:
        """What has been asked ends first, or passes its deadline."""
        self._ending = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._asking.load.deadline_s + END_S)
        await self.stop()
        if self._owner.failure is not None:
            raise self._owner.failure

    async def stop(self) -> None:
        """At once."""
        await self._owner.stop(END_S)

    async def _client(self, number: int) -> None:
        asking, load = self._asking, self._asking.load
        rng = random.Random(f"{asking.seed}/{number}/{self._extra}")
        asked = number
        while not self._ending:
            stay_s = rng.uniform(0.0, 2.0) if rng.random() < load.leaving else None
            request = await asking.ask(asked, extra=self._extra, retries=load.retries, stay_s=stay_s)
            self.asked += len(request.tries)
            self.refused += sum(one.status in REFUSED for one in request.tries)
            if request.verdict() is Verdict.ERROR:
                await asyncio.sleep(SEND_AGAIN_S)  # told to come back later, whoever asks for something else does too
            asked += self._streams

    async def _fresh_client(self, number: int) -> None:
        asking = self._asking
        rng = random.Random(f"{asking.seed}/fresh/{number}")
        while not self._ending:
            await asking.ask_twice(drawn(asking.load, rng))
