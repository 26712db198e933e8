import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from kvcache.memory_registry import MemoryRegistry
from kvcache.registration import Registration
from kvcache.registry import NodeRecord
from pronghorn.clock import SystemClock
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation, NodeName
from pronghorn.tasks import Owner

LEASE_S = 0.09


def record() -> NodeRecord:
    return NodeRecord(
        name=NodeName("decode-1"),
        role="decode",
        model="m",
        address="127.0.0.1:1",
        incarnation=Incarnation("d" * 32),
        layout={},
        seed_digest="",
        load={},
        host="127.0.0.1",
        pid=1,
        registered_at_unix_s=1.0,
    )


class MoodyRegistry(MemoryRegistry):
    """Answers while it is up; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.up = True
        self.asked = 0
        self.changed = asyncio.Event()

    async def register(self, record: NodeRecord, lease_s: float) -> None:
        self.asked += 1
        self.changed.set()
        if not self.up:
            raise Unavailable("the registry does not answer")
        await super().register(record, lease_s)

    async def deregister(self, name: NodeName, incarnation: Incarnation) -> None:
        if not self.up:
            raise Unavailable("the registry does not answer")
        await super().deregister(name, incarnation)

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(60.0):
            while self.asked < times:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    owner = Owner("test")
    yield owner
    await owner.stop(1.0)


async def test_the_lease_is_refreshed_until_the_end_and_the_row_goes_then(owner: Owner) -> None:
    registry = MoodyRegistry()
    registration = Registration(registry, LEASE_S, record)
    assert not registration.begun
    registration.begin(owner)
    registration.begin(owner)
    await registry.until_asked(5)
    assert [row.name for row in await registry.list()] == ["decode-1"]
    await registration.end()
    assert await registry.list() == []
    assert owner.running == []


async def test_an_outage_is_logged_once_and_ridden_out(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry = MoodyRegistry()
    registry.up = False
    registration = Registration(registry, LEASE_S, record)
    registration.begin(owner)
    await registry.until_asked(4)
    registry.up = True
    await registry.until_asked(6)
    assert len(await registry.list()) == 1
    assert [line for line in caplog.messages if "could not register" in line][1:] == []
    assert [line for line in caplog.messages if "again" in line] == ["decode-1 is in the registry again"]
    await registration.end()


async def test_leaving_while_the_registry_is_away_is_not_a_fault(owner: Owner) -> None:
    registry = MoodyRegistry()
    registration = Registration(registry, LEASE_S, record)
    registration.begin(owner)
    await registry.until_asked(1)
    registry.up = False
    await registration.end()
    assert owner.running == []


async def test_a_node_that_never_registered_leaves_without_a_word(owner: Owner) -> None:
    registry = MoodyRegistry()
    registration = Registration(registry, LEASE_S, record)
    await registration.end()
    registration.begin(owner)
    assert owner.running == [] and registry.asked == 0
