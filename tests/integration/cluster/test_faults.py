"""Many clients, some of whom leave, while a prefill node is killed: every request ends, and nothing stays held."""

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.cluster.conftest import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

REQUESTS = 80
AT_ONCE = 8
REQUEST_S = 120.0


def body(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((5, 15, 16, 17, 60, 150))
    return {
        "model": "smollm2-135m-instruct",
        "prompt": [rng.randrange(1000, 40000) for _ in range(length)],
        "max_tokens": rng.choice((1, 4, 16, 48)),
        "stream": rng.random() < 0.7,
        "temperature": rng.choice((0.0, 0.8)),
    }


async def ask(client: httpx.AsyncClient, rng: random.Random, leaves: bool) -> str:
    """How the request ended: "answered", "left", or the error's code. Raises where it did not end."""
    stay_s = rng.uniform(0.0, 0.5) if leaves else REQUEST_S
    try:
        async with asyncio.timeout(stay_s):
            async with client.stream("POST", "/v1/completions", json=body(rng)) as response:
                text = "".join([piece async for piece in response.aiter_text()])
    except TimeoutError:
        if leaves:
            return "left"
        raise
    if '"error"' in text:
        return "error: " + text[-300:]
    streamed = response.headers["content-type"].startswith("text/event-stream")
    assert not streamed or text.rstrip().endswith("data: [DONE]"), text[-300:]
    return "answered"


async def storm(cluster: RunningCluster) -> Counter[str]:
    rng = random.Random(5)
    slots = asyncio.Semaphore(AT_ONCE)
    done = 0

    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S, trust_env=False) as client:

        async def one(number: int) -> str:
            nonlocal done
            async with slots:
                ended = await ask(client, random.Random(rng.random()), leaves=number % 4 == 0)
            done += 1
            if done == REQUESTS // 3:
                os.kill(cluster.replica_pids("prefill")[0], signal.SIGKILL)
            return ended

        return Counter(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


def test_every_request_ends_though_clients_leave_and_a_prefill_node_is_killed(cluster: RunningCluster) -> None:
    ended = asyncio.run(storm(cluster))
    assert sum(ended.values()) == REQUESTS
    assert set(ended) == {"answered", "left"}, ended
    cluster.wait_until_at_rest()
    status = cluster.status()
    assert (status["in_flight"], status["blocks"]["held"]) == (0, 0)


def test_the_killed_node_is_replaced(cluster: RunningCluster) -> None:
    def both_there(status: dict[str, Any]) -> bool:
        return sum(node["role"] == "prefill" and node["healthy"] for node in status["nodes"]) == 2

    cluster.wait_until(both_there, 120.0)


def test_an_engine_ends_with_its_node(cluster: RunningCluster) -> None:
    engines = [
        child
        for pid in cluster.replica_pids("prefill")
        for child in psutil.Process(pid).children()
        if "prefill_nodes.engine" in " ".join(child.cmdline())
    ]
    assert len(engines) == 2
