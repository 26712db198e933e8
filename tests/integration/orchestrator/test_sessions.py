"""The orchestrator's core over real gRPC streams on loopback; the nodes are played by the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from kvcache.hashing import seed_digest
from kvcache.memory_registry import MemoryRegistry
from orchestrator.assembly import identify, start_replica
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pipelines.types.frames import Abort, Delta, Heartbeat, Outputs, Submit
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.clock import SystemClock
from pronghorn.deadline import Deadline
from pronghorn.errors import NodeLost
from tests.fakes.grpc_node import GrpcNode, serving
from tests.fakes.memory_node import MODEL, record, report
from tests.fakes.orchestrator_cluster import config

LEASE_S = 3600.0
CLOCK = SystemClock()


def job(budget_s: float = 30.0) -> GenerationJob:
    context = TextContext(max_length=64, tokens=TokenBuffer(np.arange(4, dtype=np.int64)))
    return GenerationJob(context, Deadline.after(CLOCK.now_s(), budget_s), MODEL)


class SilentWire:
    """A TCP relay that can fall silent in both directions without closing anything, as a cut link does."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open = asyncio.Event()
        self._open.set()

    def cut(self) -> None:
        self._open.clear()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, far_writer))
                tasks.create_task(self._pump(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def one_node(wire: bool = False) -> AsyncIterator[tuple[Replica, GrpcNode, SilentWire | None]]:
    registry = MemoryRegistry(CLOCK)
    digest = seed_digest(await registry.cluster_seed())
    async with serving(msgspec.structs.replace(record("decode-1"), seed_digest=digest)) as node:
        registered, cut = node.record, None
        server: asyncio.Server | None = None
        if wire:
            cut = SilentWire(int(node.record.address.split(":")[1]))
            server = await asyncio.start_server(cut.relay, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            registered = msgspec.structs.replace(node.record, address=f"127.0.0.1:{port}")
        await registry.register(registered, LEASE_S)
        settings = config(migration_wait_s=0.2)
        identity = await identify("orchestrator-1", settings, registry)
        replica = await start_replica(identity, settings, registry)
        try:
            async with asyncio.timeout(60.0):
                while not replica.ready()[0]:  # noqa: ASYNC110  (readiness is not announced)
                    await asyncio.sleep(0.005)
            yield replica, node, cut
        finally:
            await replica.stop()
            assert replica.failure() is None
            assert replica.in_flight() == 0
            assert replica.membership.running == []
            if server is not None:
                server.close()


async def submitted(node: GrpcNode) -> Submit:
    frame = await node.received.get()
    assert isinstance(frame, Submit)
    return frame


async def play(node: GrpcNode, tokens: list[int]) -> None:
    submit = await submitted(node)
    for token in tokens[:-1]:
        node.say(Outputs([Delta(submit.fence, [token])]))
    node.say(Outputs([Delta(submit.fence, tokens[-1:], GenerationStatus.END_OF_SEQUENCE, num_cached_tokens=3)]))


async def test_a_request_crosses_the_wire_and_its_tokens_come_back() -> None:
    async with one_node() as (replica, node, _), asyncio.TaskGroup() as tasks:
        tasks.create_task(play(node, [5, 6, 2]))
        async with replica.generate(job()) as outputs:
            got = [output async for output in outputs]
        assert [output.tokens for output in got] == [[5], [6], [2]]
        assert got[-1].num_cached_tokens == 3
        assert replica.in_flight() == 0


async def test_many_requests_share_one_session() -> None:
    async with one_node() as (replica, node, _):

        async def answer_all(count: int) -> None:
            for _ in range(count):
                submit = await submitted(node)
                prompt = len(submit.context.tokens)
                node.say(Outputs([Delta(submit.fence, [prompt], GenerationStatus.END_OF_SEQUENCE)]))

        async def request() -> list[int]:
            async with replica.generate(job()) as outputs:
                return [token async for output in outputs for token in output.tokens]

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer_all(50))
            requests = [tasks.create_task(request()) for _ in range(50)]
        assert [request.result() for request in requests] == [[4]] * 50


async def test_a_client_that_leaves_is_an_abort_on_the_wire() -> None:
    async with one_node() as (replica, node, _):

        async def leave_after_the_first_token() -> None:
            async with replica.generate(job()) as outputs:
                await anext(outputs)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave_after_the_first_token())
            submit = await submitted(node)
            node.say(Outputs([Delta(submit.fence, [5])]))
        assert await node.received.get() == Abort(submit.fence)
        assert replica.in_flight() == 0


async def test_a_node_that_dies_mid_stream_and_has_no_heir_is_one_typed_error() -> None:
    async with one_node() as (replica, node, _), asyncio.TaskGroup() as tasks:

        async def first_token_then_death() -> None:
            submit = await submitted(node)
            node.say(Outputs([Delta(submit.fence, [5])]))

        tasks.create_task(first_token_then_death())
        async with asyncio.timeout(60.0), replica.generate(job()) as outputs:
            assert (await anext(outputs)).tokens == [5]
            await node.kill()
            with pytest.raises(NodeLost):
                await anext(outputs)
        assert replica.in_flight() == 0


async def test_a_wire_that_falls_silent_is_noticed_by_keepalive() -> None:
    """Nothing is closed and no packet comes back: only pings that nobody answers tell."""
    async with one_node(wire=True) as (replica, node, wire), asyncio.TaskGroup() as tasks:
        assert wire is not None

        async def first_token() -> None:
            submit = await submitted(node)
            node.say(Outputs([Delta(submit.fence, [5])]))

        tasks.create_task(first_token())
        async with replica.generate(job()) as outputs:
            await anext(outputs)
            wire.cut()
            with pytest.raises(NodeLost):
                async with asyncio.timeout(30.0):  # keepalive's period and timeout are 2 s together
                    await anext(outputs)
        assert not replica.ready()[0]


async def test_a_node_that_says_it_is_unhealthy_is_not_used() -> None:
    async with one_node() as (replica, node, _):
        node.say(Heartbeat(report(node.record, healthy=False)))
        async with asyncio.timeout(60.0):
            while replica.ready()[0]:  # noqa: ASYNC110  (as above)
                await asyncio.sleep(0.005)
