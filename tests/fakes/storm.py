"""Many mixed requests at once, some of which are cut by their client: how each of them ended."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

AT_ONCE = 8
MODEL = "smollm2-135m-instruct"


@dataclass
class Storm:
    """`requests` of them, every fourth cut; `on_ended` hears how many have ended, one by one."""

    url: str
    seed: int
    requests: int
    limit_s: float
    """By when each must have ended."""
    on_ended: Callable[[int], None]
    ended: Counter[str] = field(default_factory=Counter)
    """By "answered", "cut", or the code of the error that ended it."""

    async def rage(self) -> Counter[str]:
        rng = random.Random(self.seed)
        plans = [(random.Random(rng.random()), number % 4 == 0) for number in range(self.requests)]
        slots = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.limit_s, trust_env=False) as client:
            await asyncio.gather(*(self._one(client, slots, own, cut) for own, cut in plans))
        return self.ended

    async def _one(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, rng: random.Random, cut: bool) -> None:
        async with slots:
            self.ended[await self._ask(client, rng, cut)] += 1
        self.on_ended(self.ended.total())

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random, cut: bool) -> str:
        stay_s = rng.uniform(0.0, 0.5) if cut else self.limit_s
        try:
            async with asyncio.timeout(stay_s):
                async with client.stream("POST", "/v1/completions", json=body(rng)) as response:
                    return ending(response, "".join([piece async for piece in response.aiter_text()]))
        except TimeoutError:
            if cut:
                return "cut"
            raise


def body(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((5, 15, 16, 17, 60, 150))
    return {
        "model": MODEL,
        "prompt": [rng.randrange(1000, 40000) for _ in range(length)],
        "max_tokens": rng.choice((1, 4, 16, 48)),
        "stream": rng.random() < 0.7,
        "temperature": rng.choice((0.0, 0.8)),
    }


def ending(response: httpx.Response, text: str) -> str:
    """How the answer says that it ended; fails where it does not say so properly."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        whole = json.loads(text)
        return "answered" if response.status_code == httpx.codes.OK else str(whole["error"]["code"])
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] == "[DONE]":
        assert sum("finish_reason" in event and '"finish_reason":null' not in event for event in events) == 1, text
        assert '"error"' not in text
        return "answered"
    code = json.loads(events[-1])["error"]["code"]
    assert sum('"error"' in event for event in events) == 1, text
    return str(code)
