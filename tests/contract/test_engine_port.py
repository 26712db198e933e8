"""What a node may rely on in its engine: one suite for the thread and for the child process, then what only a process
must bear."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from pipelines.runtime.messages import Admit, Adopt, EngineEvent, Failed, Release, Reserved, TokenDelta
from pipelines.runtime.port import EnginePort
from pipelines.runtime.process import ProcessEngine
from pipelines.runtime.thread import ThreadEngine
from pronghorn.errors import ConfigurationError, EngineDied, Overloaded
from tests.fakes import canary_decode
from tests.fakes.canary_engine import SEED, canary_config, canary_context, canary_memory
from tests.fakes.canary_pipeline import VOCAB_SIZE, canary_layout, continuation, write_blocks
from tests.fakes.engine_play import fence

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0
"""Longer than an engine needs; `stop` returns as soon as it has ended."""

NewEngine = Callable[..., EnginePort]


def thread_engine(**changes: object) -> ThreadEngine:
    config = canary_config(**changes)
    return ThreadEngine(canary_decode.build, config, SEED, canary_memory(config), name="decode-t")


def process_engine(
    *, entry: str = "tests.fakes.canary_decode", start_timeout_s: float = 60.0, **changes: object
) -> ProcessEngine:
    config = canary_config(**changes)
    memory = canary_memory(config)
    return ProcessEngine(entry, config, SEED, memory, name="decode-p", start_timeout_s=start_timeout_s)


@pytest.fixture
async def started() -> AsyncIterator[list[EnginePort]]:
    """Engines that the test has made; stopped at its end."""
    engines: list[EnginePort] = []
    yield engines
    for engine in engines:
        await engine.stop(GRACE_S)


@pytest.fixture(params=[thread_engine, process_engine], ids=["thread", "process"])
def new_engine(request: pytest.FixtureRequest, started: list[EnginePort]) -> NewEngine:
    def new(**changes: object) -> EnginePort:
        engine: EnginePort = request.param(**changes)
        started.append(engine)
        return engine

    return new


async def events_until(engine: EnginePort, done: Callable[[EngineEvent], bool]) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    async with asyncio.timeout(30.0):
        while not any(done(event) for event in events):
            events += (await engine.receive()).events
    return events


def is_last(event: EngineEvent) -> bool:
    return isinstance(event, Failed) or (isinstance(event, TokenDelta) and event.status.is_done)


async def next_error(engine: EnginePort, within_s: float = 30.0) -> EngineDied:
    """What `receive` raises after the reports that are still there."""
    with pytest.raises(EngineDied) as caught:
        async with asyncio.timeout(within_s):
            while True:
                await engine.receive()
    return caught.value


def admit(name: str, prompt: list[int], new_tokens: int = 6, *, here: bool = True) -> Admit:
    return Admit(fence(name), canary_context(prompt, new_tokens, request_id=name), 60.0, prefill_here=here)


# --- both ------------------------------------------------------------------------------------------------------------


async def test_it_says_what_it_is_and_generates(new_engine: NewEngine) -> None:
    engine = new_engine()
    ready = await engine.start()
    assert (ready.layout, ready.vocab_size) == (canary_layout(4), VOCAB_SIZE)
    engine.send(admit("one", [1, 2, 3, 4, 5]))
    deltas = [event for event in await events_until(engine, is_last) if isinstance(event, TokenDelta)]
    assert [token for delta in deltas for token in delta.tokens] == continuation([1, 2, 3, 4, 5], 6)


async def test_blocks_that_the_shell_writes_are_the_blocks_that_the_engine_reads(new_engine: NewEngine) -> None:
    engine, prompt = new_engine(), list(range(1, 11))
    await engine.start()
    engine.send(admit("one", prompt, here=False))
    (reserved,) = await events_until(engine, lambda event: isinstance(event, Reserved))
    assert isinstance(reserved, Reserved)
    write_blocks(engine.memory, 4, prompt, dict(enumerate(reserved.block_ids)))
    first, *rest = continuation(prompt, 6)
    engine.send(Adopt(fence("one"), first))
    deltas = [event for event in await events_until(engine, is_last) if isinstance(event, TokenDelta)]
    assert [token for delta in deltas for token in delta.tokens] == rest


async def test_a_block_with_other_bytes_than_its_prefix_makes_breaks_the_canary(new_engine: NewEngine) -> None:
    engine, prompt = new_engine(), list(range(1, 11))
    await engine.start()
    engine.send(admit("one", prompt, here=False))
    (reserved,) = await events_until(engine, lambda event: isinstance(event, Reserved))
    assert isinstance(reserved, Reserved)
    write_blocks(engine.memory, 4, prompt, dict(enumerate(reserved.block_ids)))
    engine.memory.block(reserved.block_ids[1])[7] ^= 1
    engine.send(Adopt(fence("one"), continuation(prompt, 1)[0]))
    assert "does not hold token" in str(await next_error(engine))


async def test_an_idle_engine_goes_on_reporting(new_engine: NewEngine) -> None:
    engine = new_engine()
    await engine.start()
    async with asyncio.timeout(60.0):
        reports = [await engine.receive() for _ in range(3)]
    assert all(report.load.total_blocks == 64 and report.stats is None for report in reports)


async def test_a_start_that_cannot_work_raises_the_engines_own_error(new_engine: NewEngine) -> None:
    engine = new_engine(model_path="llama:")
    with pytest.raises(ConfigurationError, match="llama: is not a canary"):
        await engine.start()


async def test_a_fault_ends_the_engine_with_its_reason_after_the_last_reports(new_engine: NewEngine) -> None:
    engine = new_engine(model_path="canary:?break_on=666")
    await engine.start()
    engine.send(admit("good", [1, 2, 3], 3))
    await events_until(engine, is_last)
    engine.send(admit("bad", [6, 66, 666]))
    error = await next_error(engine)
    assert "token 666 breaks this canary" in str(error)
    with pytest.raises(EngineDied, match="token 666"):
        engine.send(admit("late", [1]))
    assert str(await next_error(engine)) == str(error), "it says so as often as it is asked"


@pytest.mark.conformance(46)
async def test_an_engine_with_work_that_reports_nothing_is_stuck(new_engine: NewEngine) -> None:
    engine = new_engine(model_path="canary:?step_s=8", stall_timeout_s=0.4)
    await engine.start()
    engine.send(admit("one", [1, 2, 3]))
    assert "stuck" in str(await next_error(engine, within_s=7.5))


async def test_the_command_queue_is_bounded_but_what_frees_is_always_taken(new_engine: NewEngine) -> None:
    engine = new_engine(model_path="canary:?step_s=1", max_waiting=4)
    await engine.start()
    engine.send(admit("one", [1, 2, 3], 2))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        for i in range(1000):
            engine.send(admit(f"big-{i}", list(range(4000))))
    for i in range(100):
        engine.send(Release(fence(f"big-{i}")))
    ended = await events_until(engine, lambda event: event.fence == fence("one") and is_last(event))
    assert any(isinstance(event, Failed) and event.fence == fence("big-0") for event in ended)


async def test_a_shell_that_does_not_read_holds_the_engine_up_and_loses_nothing(new_engine: NewEngine) -> None:
    engine = new_engine(num_blocks=256)
    await engine.start()
    engine.send(admit("one", [1, 2, 3], 400))
    await asyncio.sleep(0.5)  # long enough for more reports than there is room for
    deltas = [event for event in await events_until(engine, is_last) if isinstance(event, TokenDelta)]
    assert [token for delta in deltas for token in delta.tokens] == continuation([1, 2, 3], 400)


async def test_stop_is_idempotent_and_nothing_comes_after_it(new_engine: NewEngine) -> None:
    engine = new_engine()
    await engine.start()
    engine.send(admit("one", [1, 2, 3], 1000))
    await engine.stop(GRACE_S)
    await engine.stop(GRACE_S)
    await next_error(engine)
    with pytest.raises(EngineDied):
        engine.send(Release(fence("one")))


async def test_an_engine_that_was_never_started_can_be_stopped(new_engine: NewEngine) -> None:
    await new_engine().stop(GRACE_S)


# --- the process -----------------------------------------------------------------------------------------------------


def pid_of(engine: ProcessEngine) -> int:
    assert engine.pid is not None
    return engine.pid


async def test_a_killed_engine_is_noticed_at_once(started: list[EnginePort]) -> None:
    engine = process_engine()
    started.append(engine)
    await engine.start()
    os.kill(pid_of(engine), signal.SIGKILL)
    error = await next_error(engine, within_s=15.0)
    assert "SIGKILL" in str(error)
    assert not psutil.pid_exists(pid_of(engine)), "it is reaped"


async def test_a_stopped_process_with_work_is_stuck_and_can_still_be_ended(started: list[EnginePort]) -> None:
    engine = process_engine(model_path="canary:?step_s=0.01", stall_timeout_s=0.4)
    started.append(engine)
    await engine.start()
    engine.send(admit("one", [1, 2, 3], 1000))
    await events_until(engine, lambda event: isinstance(event, TokenDelta))
    os.kill(pid_of(engine), signal.SIGSTOP)
    assert "stuck" in str(await next_error(engine, within_s=15.0))
    async with asyncio.timeout(15.0):
        await engine.stop(0.5)
    assert not psutil.pid_exists(pid_of(engine))


async def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing() -> None:
    engine = process_engine(start_timeout_s=0.01)
    with pytest.raises(EngineDied, match="did not start within 0.01 s"):
        await engine.start()
    assert not psutil.pid_exists(pid_of(engine))


async def test_an_engine_that_dies_before_it_can_speak_is_quoted() -> None:
    engine = process_engine(entry="tests.fakes.no_such_engine")
    with pytest.raises(EngineDied, match="(?s)exit code 1.*No module named"):
        await engine.start()


async def test_a_cancelled_start_leaves_nothing() -> None:
    engine = process_engine()
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(pid_of(engine))


async def test_ctrl_c_in_the_terminal_is_the_shells_to_answer(started: list[EnginePort]) -> None:
    engine = process_engine()
    started.append(engine)
    await engine.start()
    os.kill(pid_of(engine), signal.SIGINT)
    engine.send(admit("one", [1, 2, 3]))
    await events_until(engine, is_last)


async def test_fifty_lives_leave_no_process_and_no_descriptor() -> None:
    async def full_life() -> None:
        engine = process_engine()
        await engine.start()
        engine.send(admit("one", [1, 2, 3]))
        await events_until(engine, is_last)
        await engine.stop(GRACE_S)

    async def still_birth() -> None:
        with pytest.raises(EngineDied):
            await process_engine(entry="tests.fakes.no_such_engine").start()

    await full_life()
    here = psutil.Process()
    descriptors, children = here.num_fds(), len(here.children())
    for _ in range(5):
        await asyncio.gather(*(full_life() for _ in range(4)), *(still_birth() for _ in range(6)))
    assert here.num_fds() <= descriptors  # fewer, where something of an earlier test was closed meanwhile
    assert len(here.children()) <= children


PARENT = """
import asyncio, sys, time
from tests.contract.test_engine_port import process_engine, admit

async def main():
    engine = process_engine(model_path="canary:?step_s=60")
    await engine.start()
    engine.send(admit("one", [1, 2, 3]))
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child that is busy when its parent dies")
def test_an_engine_does_not_outlive_its_node() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([child], timeout=5.0)[1] == [], "the engine is still there"
