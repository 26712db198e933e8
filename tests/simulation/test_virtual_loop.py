"""Virtual time, and processes that pause and die."""

import asyncio
import time
from random import Random

import pytest

from cluster.simulator.process import SimProcess
from cluster.simulator.virtual_loop import SimulationStuck, VirtualLoop


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


async def _note_every_second(seen: list[float]) -> None:
    while True:
        await asyncio.sleep(1.0)
        seen.append(asyncio.get_running_loop().time())


def test_an_hour_takes_no_time(loop: VirtualLoop) -> None:
    began_s = time.perf_counter()
    loop.run_until_complete(asyncio.sleep(3600.0))
    assert loop.time() == pytest.approx(3600.0, abs=0.01)
    assert time.perf_counter() - began_s < 60.0
    loop.close()


def test_a_paused_process_runs_what_was_due_when_it_goes_on(loop: VirtualLoop) -> None:
    async def play() -> list[float]:
        process, seen = SimProcess("p"), list[float]()
        task = process.start(_note_every_second(seen), "clock")
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(5.0)
        assert len(seen) == 2
        loop.resume(process)
        await asyncio.sleep(0.1)
        assert seen[2] == pytest.approx(7.5, abs=0.01)
        task.cancel()
        return seen

    assert len(loop.run_until_complete(play())) == 3
    loop.close()


def test_a_dead_process_never_runs_again(loop: VirtualLoop) -> None:
    async def play() -> int:
        process, seen = SimProcess("p"), list[float]()
        task = process.start(_note_every_second(seen), "clock")
        await asyncio.sleep(1.5)
        process.kill()
        loop.resume(process)
        await asyncio.sleep(10.0)
        loop.burying = True
        task.cancel()
        await asyncio.wait([task])
        return len(seen)

    assert loop.run_until_complete(play()) == 1
    loop.close()


def test_the_order_of_processes_is_drawn_and_that_within_a_process_is_kept() -> None:
    def order(seed: int) -> list[str]:
        loop, seen = VirtualLoop(Random(seed)), list[str]()
        for name in "abc":
            process = SimProcess(name)
            for number in range(3):
                loop.call_soon(seen.append, f"{name}{number}", context=process.context())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return seen

    orders = [order(seed) for seed in range(10)]
    assert orders == [order(seed) for seed in range(10)]
    assert len({tuple(o) for o in orders}) > 1
    for seen in orders:
        for name in "abc":
            assert [s for s in seen if s[0] == name] == [f"{name}{n}" for n in range(3)]


def test_a_simulation_in_which_nothing_can_happen_says_so(loop: VirtualLoop) -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(wait_for_ever())
    with pytest.raises(SimulationStuck, match="nothing is left to happen"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
