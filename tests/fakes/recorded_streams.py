"""Sixteen streams of a real cluster, half of them greedy and half seeded, whose texts another run must have too.

The prompts are of tokens and always the same; what a run may not differ in is the text and the number of tokens.
"""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx

from tests.fakes.storm import MODEL

STREAMS = 16
OnToken = Callable[[int], None]
"""Hears after each event how many events the streams have had together."""


class RecordedStreams:
    def __init__(self, url: str, prompt_tokens: int, new_tokens: int, limit_s: float = 120.0) -> None:
        self._url = url
        self._new_tokens = new_tokens
        self._limit_s = limit_s
        chance = random.Random(prompt_tokens)
        self._prompts = [[chance.randrange(1000, 40_000) for _ in range(prompt_tokens)] for _ in range(STREAMS)]
        self._events = 0

    def run(self, on_token: OnToken = lambda count: None) -> list[str]:
        """The texts. Caches are dropped before, so that every prompt is handed over. Fails where a stream has another
        end than its length, or another number of tokens."""
        return asyncio.run(self._run(on_token))

    async def _run(self, on_token: OnToken) -> list[str]:
        self._events = 0
        async with httpx.AsyncClient(base_url=self._url, timeout=self._limit_s, trust_env=False) as client:
            assert (await client.post("/reset_prefix_cache")).status_code == httpx.codes.OK
            return list(await asyncio.gather(*(self._one(client, i, on_token) for i in range(STREAMS))))

    async def _one(self, client: httpx.AsyncClient, number: int, on_token: OnToken) -> str:
        seeded = {"temperature": 0.9, "seed": 100 + number} if number % 2 else {"temperature": 0.0}
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": self._prompts[number],
            "max_tokens": self._new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **seeded,
        }
        text, ends, usage = "", [], None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == httpx.codes.OK, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, f"stream {number} after {len(text)} characters: {event}"
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                self._events += 1
                on_token(self._events)
        assert ends == ["length"] and usage is not None, (number, ends)
        assert usage["completion_tokens"] == self._new_tokens, f"stream {number}: {usage}"
        return text
