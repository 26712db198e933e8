"""What an orchestrator keeps of its requests is bounded."""

import asyncio
import gc

import pytest

from tests.fakes.orchestrator_cluster import Cluster, running

ROUND = 1500
"""Requests: more than anything that remembers the last ones remembers."""
AT_ONCE = 25


async def ask(cluster: Cluster, count: int) -> None:
    async def one(number: int) -> None:
        async with cluster.replica.generate(cluster.job(4 + number % 40)) as outputs:
            async for _ in outputs:
                pass

    for _ in range(count // AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
        for node in cluster.nodes.values():
            node.received.clear()
            node.beat()


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.field("production-stack#707")
async def test_an_orchestrator_holds_no_more_after_thousands_of_requests_than_before_them() -> None:
    async with running(max_queue=AT_ONCE) as cluster:
        for name in ("prefill-1", "decode-1", "decode-2"):
            await cluster.join(name, lambda _: [[1], [2, 3]])
        await ask(cluster, ROUND)
        before = objects()
        await ask(cluster, ROUND)
        assert objects() - before < ROUND // 10, "not even one object for each of ten requests"
