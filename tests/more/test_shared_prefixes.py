"""A prefix that was computed once, anywhere in the cluster, is not computed again: two real nodes of each kind."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start
from tests.fakes.storm import MODEL

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

SHARED_TOKENS, TAIL_TOKENS, REQUESTS = 1024, 8, 16
BLOCK_TOKENS = 16
TAILS = REQUESTS * (TAIL_TOKENS + BLOCK_TOKENS)
"""What may be computed beside the shared blocks: each request's own tokens, and the block that they begin in."""


@pytest.fixture(scope="module")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    started = start(pronghorn, "shared", "--prefill=2", "--decode=2", "--kv-memory=256MiB")
    try:
        yield started
    finally:
        end(started)


def tokens(seed: int, count: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(1000, 20_000) for _ in range(count)]


def prompts(prefix: int, tails: int) -> list[list[int]]:
    shared = tokens(prefix, SHARED_TOKENS)
    return [[*shared, *tokens(1000 * tails + i, TAIL_TOKENS)] for i in range(REQUESTS)]


def nodes(cluster: RunningCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{cluster.url}/internal/status", timeout=30.0, trust_env=False).json()[
        "nodes"
    ]
    return found


def computed_tokens(cluster: RunningCluster) -> int:
    """Prompt tokens that any node has computed so far. Counters ride on heartbeats: read at rest."""
    cluster.wait_until_at_rest()
    before = -1
    while before != (now := sum(node["counters"].get("prompt_tokens", 0) for node in nodes(cluster))):
        before = now
        cluster.wait_until_at_rest()
    return now


def ask(cluster: RunningCluster, asked: list[list[int]], *, at_once: bool) -> list[int]:
    """Each answer's cached tokens."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 2
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    async def every() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300.0, trust_env=False) as client:
            if at_once:
                return list(await asyncio.gather(*(one(client, prompt) for prompt in asked)))
            return [await one(client, prompt) for prompt in asked]

    return asyncio.run(every())


def test_what_requests_share_is_computed_once_in_the_whole_cluster(cluster: RunningCluster) -> None:
    spent = [computed_tokens(cluster)]

    def spend() -> int:
        spent.append(computed_tokens(cluster))
        return spent[-1] - spent[-2]

    cached = ask(cluster, prompts(1, 1), at_once=False)
    assert spend() <= SHARED_TOKENS + TAILS
    assert cached[0] == 0 and all(count >= SHARED_TOKENS - BLOCK_TOKENS for count in cached[1:])

    ask(cluster, prompts(2, 2), at_once=True)
    assert spend() <= SHARED_TOKENS + TAILS

    ask(cluster, prompts(2, 3), at_once=True)
    assert spend() <= TAILS

    os.kill(cluster.replica_pids("prefill")[0], signal.SIGKILL)
    ask(cluster, prompts(2, 4), at_once=True)
    survivors = sum(node["counters"].get("prompt_tokens", 0) for node in nodes(cluster))
    assert survivors <= spent[-1] + SHARED_TOKENS + TAILS
