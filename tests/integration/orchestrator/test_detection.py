"""A node that has gone is noticed, whatever its way of going; one that is only busy never is. On real sockets.

How soon is measured by `python -m bench.detection`.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

import msgspec
import pytest

from cluster.chaos.cut_proxy import DOWN, CutProxy, cut_proxy
from kvcache.memory_registry import MemoryRegistry
from orchestrator.node_client import GrpcConnector
from orchestrator.replica import Replica
from pipelines.types.frames import Heartbeat
from pronghorn.clock import SystemClock
from pronghorn.credentials import SILENT
from pronghorn.errors import NodeLost
from tests.fakes.canary_engine import SEED
from tests.fakes.node_process import NodeProcess, node_process
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL, orchestrator_identity

HEARTBEATS = 24

FAULTS: dict[str, Callable[[NodeProcess, CutProxy], None]] = {
    "killed": lambda node, _: node.kill(),
    "stopped": lambda node, _: node.pause(),
    "link down": lambda _, proxy: proxy.hold(),
    "link down one way": lambda _, proxy: proxy.hold(DOWN),
    "black hole": lambda _, proxy: proxy.drop(),
    "reset": lambda _, proxy: proxy.reset(),
}


@contextmanager
def every_core_busy() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


class Watched:
    def __init__(self, node: NodeProcess, proxy: CutProxy) -> None:
        self.node, self.proxy = node, proxy
        self.clock = SystemClock()
        self.registry = MemoryRegistry(self.clock, new_seed=lambda: SEED)
        self.record = msgspec.structs.replace(node.record, address=proxy.address)
        self.connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=64)
        self.replica = Replica(config(model_name=MODEL), self.registry, self.connector, self.clock)

    @property
    def usable(self) -> bool:
        return [view.unusable for view in self.replica.views()] == [None]

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not what():  # noqa: ASYNC110  (there is no event to wait for)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    async with node_process("decode", "decode-0") as node, cut_proxy(node.record.address) as proxy:
        seen = Watched(node, proxy)
        await seen.registry.register(seen.record, 3600.0)
        seen.replica.start()
        try:
            await seen.until(lambda: seen.usable)
            yield seen
        finally:
            await seen.replica.stop()


@pytest.mark.field("dynamo#13095")
@pytest.mark.parametrize("name", FAULTS)
async def test_a_node_that_has_gone_is_noticed(name: str) -> None:
    async with watched() as seen:
        FAULTS[name](seen.node, seen.proxy)
        await seen.until(lambda: seen.replica.counters().get("session_lost.decode", 0) == 1)
        if name != "reset":  # which is over before it is looked at
            assert not seen.usable
        if name != "killed":
            seen.node.resume()
            seen.proxy.heal()
            await seen.until(lambda: seen.usable)


async def test_a_healthy_node_on_a_busy_machine_is_never_taken_for_dead() -> None:
    """Three tries, since somebody else on the machine may keep a node from running at all, and then it is silent."""
    for _ in range(3):
        if await stays_usable_on_a_busy_machine():
            return
    pytest.fail("it was taken for dead in each of three tries")


async def stays_usable_on_a_busy_machine() -> bool:
    async with watched() as seen:
        client = seen.connector.client(seen.record)
        await client.connect()
        heard = 0
        try:
            with every_core_busy():
                async with aclosing(client.frames()) as frames:
                    async for frame in frames:
                        heard += isinstance(frame, Heartbeat)
                        if heard == HEARTBEATS or not seen.usable:
                            break
        except NodeLost:
            return False
        finally:
            await client.close()
        return heard == HEARTBEATS and "session_lost.decode" not in seen.replica.counters()


@pytest.mark.parametrize(("name", "code"), [("killed", "node_lost"), ("stopped", SILENT), ("link down", SILENT)])
async def test_whether_its_process_is_gone_or_only_silent_is_told_apart(name: str, code: str) -> None:
    """A request on a node that was killed may have killed it; one that nobody hears may just be busy."""
    async with node_process("decode", "decode-0") as node, cut_proxy(node.record.address) as proxy:
        connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=30.0, send_queue_frames=64)
        client = connector.client(msgspec.structs.replace(node.record, address=proxy.address))
        await client.connect()
        FAULTS[name](node, proxy)
        with pytest.raises(NodeLost) as lost:
            async with asyncio.timeout(60.0):
                async for _ in client.frames():
                    pass
        assert lost.value.code == code
        await client.close()
        proxy.heal()
        node.resume()
