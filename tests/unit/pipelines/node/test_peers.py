"""On virtual time, over the registry in memory."""

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from cluster.simulator.virtual_loop import VirtualLoop
from kvcache.memory_registry import MemoryRegistry
from kvcache.registry import NodeRecord
from pipelines.node.peers import PAUSE_S, Peers
from pronghorn.clock import ManualClock
from pronghorn.errors import Unavailable
from pronghorn.ids import NodeName
from tests.contract.test_node_registry import OLD


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(1))
    yield loop
    loop.close()


class Forgetful(MemoryRegistry):
    """Does not answer the next `misses` listings, though its watchers hear of every change."""

    misses = 0

    async def list(self) -> list[NodeRecord]:
        if self.misses:
            self.misses -= 1
            raise Unavailable("the registry did not answer in time")
        return await super().list()


def test_others_are_peers_and_oneself_is_none(loop: VirtualLoop) -> None:
    async def play() -> None:
        registry = Forgetful(ManualClock())
        await registry.register(OLD, 60.0)
        theirs, ours = Peers(registry, NodeName("me"), OLD.model), Peers(registry, OLD.name, OLD.model)
        watching = [loop.create_task(peers.watch()) for peers in (theirs, ours)]
        await asyncio.sleep(PAUSE_S)
        assert list(theirs()) == [OLD.name] and not ours()
        for task in watching:
            task.cancel()

    loop.run_until_complete(play())


def test_a_node_of_another_model_is_no_peer(loop: VirtualLoop) -> None:
    async def play() -> None:
        registry = Forgetful(ManualClock())
        await registry.register(OLD, 60.0)
        peers = Peers(registry, NodeName("me"), "another")
        watching = loop.create_task(peers.watch())
        await asyncio.sleep(PAUSE_S)
        assert not peers()
        watching.cancel()

    loop.run_until_complete(play())


def test_a_listing_that_was_not_answered_is_asked_for_again_though_nothing_changes(loop: VirtualLoop) -> None:
    async def play() -> None:
        registry = Forgetful(ManualClock())
        peers = Peers(registry, NodeName("me"), OLD.model)
        watching = loop.create_task(peers.watch())
        await asyncio.sleep(2 * PAUSE_S)
        registry.misses = 2
        await registry.register(OLD, 60.0)
        await asyncio.sleep(4 * PAUSE_S)
        assert list(peers()) == [OLD.name]
        watching.cancel()

    loop.run_until_complete(play())
