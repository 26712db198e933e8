"""On virtual time, so that the time a wait takes can be said exactly."""

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from cluster.simulator.virtual_loop import VirtualLoop
from pipelines.node.grace import Grace


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(1))
    yield loop
    loop.close()


async def never() -> None:
    await asyncio.Event().wait()


def test_what_comes_to_rest_in_time_is_not_cut(loop: VirtualLoop) -> None:
    async def play() -> bool:
        grace = Grace()
        grace.within(10.0)
        return await grace.wait(asyncio.sleep(9.0))

    assert loop.run_until_complete(play())
    assert loop.time() == pytest.approx(9.0, abs=0.01)


@pytest.mark.parametrize(
    ("asked_s", "ends_s"),
    [(1.0, 3.0), (60.0, 10.0), (0.0, 2.0)],
    ids=["a shorter one counts", "a longer one does not", "none ends it at once"],
)
def test_who_asks_again_after_two_seconds(loop: VirtualLoop, asked_s: float, ends_s: float) -> None:
    async def play() -> bool:
        grace = Grace()
        grace.within(10.0)
        asyncio.get_running_loop().call_later(2.0, grace.within, asked_s)
        return await grace.wait(never())

    assert not loop.run_until_complete(play())
    assert loop.time() == pytest.approx(ends_s, abs=0.01)


def test_asked_again_while_it_expires_it_expires(loop: VirtualLoop) -> None:
    async def play() -> bool:
        grace = Grace()
        grace.within(1.0)
        asyncio.get_running_loop().call_later(1.0, grace.within, 0.0)
        return await grace.wait(never())

    assert not loop.run_until_complete(play())
