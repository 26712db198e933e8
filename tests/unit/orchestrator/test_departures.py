"""Nodes that go without a word, or fail one request after another: who is sent where, and what is said of it."""

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from orchestrator.ports import GenerationJob
from pipelines.types.frames import Submit
from pronghorn.errors import NodeLost, TransferFailed
from tests.fakes.memory_node import MemoryNode
from tests.fakes.orchestrator_cluster import LEASE_S, Cluster, running

NODES = ("decode-0", "decode-1", "decode-2")


def fives(submit: Submit) -> list[list[int]]:
    return [[5]]


async def tokens_of(cluster: Cluster, job: GenerationJob) -> list[int]:
    async with cluster.replica.generate(job) as outputs:
        return [token async for output in outputs for token in output.tokens]


def asked(cluster: Cluster) -> dict[str, int]:
    return {name: len(node.submits) for name, node in cluster.nodes.items()}


@pytest.fixture
async def sticky() -> AsyncIterator[Cluster]:
    async with running(policy="sticky_session") as cluster:
        for name in NODES:
            await cluster.join(name, fives)
        yield cluster


async def evict(cluster: Cluster, node: MemoryNode, row: str) -> None:
    node.refuses = NodeLost("nobody answers there")
    node.lose()
    match row:
        case "deleted":
            await cluster.leave(node.record.name)
        case "address cleared":
            await cluster.registry.register(msgspec.structs.replace(node.record, address=""), LEASE_S)
        case "left behind":
            pass


@pytest.mark.field("production-stack#1008", "production-stack#420", "production-stack#668", "production-stack#15")
@pytest.mark.parametrize("row", ["deleted", "address cleared", "left behind"])
async def test_a_session_whose_node_was_evicted_binds_anew_with_its_next_request(sticky: Cluster, row: str) -> None:
    """production-stack#1008: an evicted worker was still picked, and sessions stayed pinned to it."""

    async def ask() -> str:
        before = asked(sticky)
        assert await tokens_of(sticky, replace(sticky.job(), session="talk")) == [5]
        (where,) = [name for name, count in asked(sticky).items() if count > before[name]]
        return where

    first = await ask()
    assert {await ask() for _ in range(3)} == {first}
    await evict(sticky, sticky[first], row)
    second = await ask()
    assert second != first
    assert {await ask() for _ in range(5)} == {second}


@pytest.mark.field("production-stack#1091")
async def test_nodes_that_fail_what_they_are_given_are_told_of_though_no_client_hears_of_it() -> None:
    """production-stack#1091: requests went to dead workers for hours, and health was green."""
    async with running(breaker_failures=1000) as cluster:
        await cluster.join("decode-0", fives)
        bad = await cluster.join("decode-1")

        def fails(submit: Submit) -> list[list[int]]:
            bad.fail(submit.fence, TransferFailed("gone"))
            return fives(submit)  # which is late

        bad.answer = fails
        for _ in range(30):
            assert await tokens_of(cluster, cluster.job()) == [5]
        assert len(bad.submits) >= 10
        said = cluster.replica.degraded()
        assert said is not None and said.startswith(f"{len(bad.submits)} of the last ")
        bad.answer = fives
        for _ in range(200):
            await tokens_of(cluster, cluster.job())
        assert cluster.replica.degraded() is None
