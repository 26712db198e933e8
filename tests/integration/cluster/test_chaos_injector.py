"""Faults are done to real processes and real links, and their proofs tell what was done; a cluster is not needed."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil
import pytest

from cluster.chaos.cut_proxy import CutProxy, cut_proxy
from cluster.chaos.injector import Injector
from cluster.chaos.load import Asking, Body, Clients
from cluster.chaos.recorder import Recorder
from cluster.chaos.scenario import (
    BlackHole,
    Cut,
    Fault,
    Flip,
    GcsKill,
    Kill,
    Load,
    RayletKill,
    RedisPause,
    Reset,
    Slow,
    Stop,
    When,
)
from cluster.chaos.site import Process, Site

NOW = When(s=0.0)
PATIENCE_S = 30.0


class OneNode(Site):
    """A site with one decode node, whose process and link a test names."""

    def __init__(self, pid: int | None = None, proxy: CutProxy | None = None) -> None:
        super().__init__("http://nowhere")
        self._pid = pid
        self._proxy = proxy

    async def processes(self, role: str) -> list[Process]:
        return [Process("decode-1", role, "life", "here:1", self._pid)]  # type: ignore[arg-type]

    def link(self, process: Process) -> CutProxy:
        return self._proxy if self._proxy is not None else super().link(process)

    def redis_pid(self) -> int:
        return self._pid if self._pid is not None else super().redis_pid()


@asynccontextmanager
async def injector(site: Site) -> AsyncIterator[Injector]:
    clients = Clients("http://nowhere", "m", PATIENCE_S)
    loop = asyncio.get_running_loop()
    try:
        yield Injector(site, Asking(clients, Recorder(loop.time), Load(), [Body("", 1, None)], {}, 0))
    finally:
        await clients.close()


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


async def test_a_killed_process_is_gone_and_the_proof_names_its_pid_and_its_life(sleeper: psutil.Process) -> None:
    async with injector(OneNode(sleeper.pid)) as doing:
        await doing.do(Kill(at=NOW, process="decode"))
        assert sleeper.status() == psutil.STATUS_ZOMBIE
    [fired] = doing.fired
    assert (fired.kind, fired.victim, fired.pid, fired.incarnation) == ("kill", "decode-1", sleeper.pid, "life")
    assert f"SIGKILL to pid {sleeper.pid}" in fired.seen
    assert (doing.problems, doing.gone) == ([], {"life"})


@pytest.mark.parametrize("fault", [Stop(at=NOW, process="decode", for_s=0.2), RedisPause(at=NOW, for_s=0.2)])
async def test_what_is_stopped_goes_on(sleeper: psutil.Process, fault: Fault) -> None:
    async with injector(OneNode(sleeper.pid)) as doing:
        await doing.do(fault)
        assert sleeper.status() != psutil.STATUS_STOPPED
    [fired] = doing.fired
    assert "which was stopped" in fired.seen and fired.ended_s is not None and doing.problems == []


async def test_what_is_stopped_goes_on_though_the_scenario_is_given_up(sleeper: psutil.Process) -> None:
    async with injector(OneNode(sleeper.pid)) as doing:
        stopping = asyncio.ensure_future(doing.do(Stop(at=NOW, process="decode", for_s=600.0)))
        async with asyncio.timeout(PATIENCE_S):
            while sleeper.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  (the kernel announces it to nobody)
                await asyncio.sleep(0.01)
        stopping.cancel()
        await asyncio.wait([stopping], timeout=PATIENCE_S)
        assert sleeper.status() != psutil.STATUS_STOPPED


class OneMachine(OneNode):
    """A raylet that a test names, and a machine that joins."""

    def raylet(self, node: Process) -> psutil.Process:
        return psutil.Process(self._pid)

    async def add_machine(self) -> str:
        return "127.0.0.9"


async def test_with_a_raylet_every_life_on_its_machine_is_over_and_another_machine_joins(
    sleeper: psutil.Process,
) -> None:
    async with injector(OneMachine(sleeper.pid)) as doing:
        await doing.do(RayletKill(at=NOW, node="decode", another_after_s=0.01))
    [fired] = doing.fired
    assert (fired.pid, doing.gone, doing.problems) == (sleeper.pid, {"life"}, [])
    assert "raylet at here" in fired.seen and "127.0.0.9 joined" in fired.seen and fired.ended_s is not None


async def test_a_fault_that_cannot_be_done_is_a_problem_and_no_proof() -> None:
    async with injector(OneNode()) as doing:
        await doing.do(Kill(at=NOW, process="decode"))
        await doing.do(RedisPause(at=NOW, for_s=1.0))
        await doing.do(Reset(at=NOW, node="decode"))
        await doing.do(RayletKill(at=NOW, node="decode"))
        await doing.do(GcsKill(at=NOW, for_s=1.0))
    assert doing.fired == []
    assert len(doing.problems) == 5 and all("could not be done" in problem for problem in doing.problems)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def link() -> AsyncIterator[tuple[CutProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through a proxy to a server that says back what it hears."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with cut_proxy(f"127.0.0.1:{port}") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        yield proxy, reader, writer
        writer.close()
    server.close()


@pytest.mark.parametrize(
    "fault",
    [
        Cut(at=NOW, node="decode", for_s=0.5),
        Cut(at=NOW, node="decode", for_s=0.5, ways="up"),
        BlackHole(at=NOW, node="decode", for_s=0.5, ways="up"),
        Slow(at=NOW, node="decode", for_s=0.5, bytes_per_s=1e6),
    ],
)
async def test_a_harmed_link_is_proved_by_the_bytes_that_it_met(fault: Fault) -> None:
    async with link() as (proxy, _, writer), injector(OneNode(proxy=proxy)) as doing:
        doing_it = asyncio.ensure_future(doing.do(fault))
        while not doing_it.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        await doing_it
    assert doing.problems == []
    [fired] = doing.fired
    assert "were met by it" in fired.seen and fired.ended_s is not None


async def test_a_link_on_which_nothing_passes_has_not_been_harmed() -> None:
    async with link() as (proxy, _, _), injector(OneNode(proxy=proxy)) as doing:
        await doing.do(Cut(at=NOW, node="decode", for_s=0.1))
    assert doing.fired == [] and "nothing passed" in doing.problems[0]


async def test_a_flipped_byte_is_waited_for_and_a_reset_counts_its_connections() -> None:
    async with link() as (proxy, reader, writer), injector(OneNode(proxy=proxy)) as doing:
        flipping = asyncio.ensure_future(doing.do(Flip(at=NOW, node="decode", offset=2, ways="up")))
        heard = b"aaaaa"
        async with asyncio.timeout(PATIENCE_S):
            while heard == b"aaaaa":
                writer.write(b"aaaaa")
                heard = await reader.readexactly(5)
        await flipping
        await doing.do(Reset(at=NOW, node="decode"))
    assert [fired.kind for fired in doing.fired] == ["flip", "reset"]
    assert doing.fired[1].seen.startswith("1 connections") and doing.problems == []


async def test_a_fault_strikes_when_so_many_bytes_have_passed_on_the_victims_link(sleeper: psutil.Process) -> None:
    async with link() as (proxy, reader, writer), injector(OneNode(sleeper.pid, proxy)) as doing:
        killing = asyncio.ensure_future(doing.do(Kill(at=When(link_bytes=20), process="decode")))
        await asyncio.sleep(0)
        for _ in range(3):
            writer.write(b"aaaaa")
            await reader.readexactly(5)
        assert sleeper.is_running() and not killing.done()
        for _ in range(2):
            writer.write(b"aaaaa")
            await reader.readexactly(5)
        await asyncio.wait_for(killing, PATIENCE_S)
    assert doing.fired[0].pid == sleeper.pid
