"""Beside a handler of the shape of Ray's; `tests/more/test_leaving.py` asks Ray's own."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pronghorn.sigterm import ENDING, hear_sigterm

WORKER = f"""
def handler(signum, frame):
    {ENDING}("The process receives a SIGTERM.", exit_code=1)
"""


def ending(_message: str, exit_code: int) -> None:
    raise AssertionError("the process would have ended")


@pytest.fixture(autouse=True)
def worker() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    module: dict[str, Any] = {ENDING: ending}
    exec(WORKER, module)
    handler: Callable[[int, Any], None] = module["handler"]
    signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


async def test_sigterm_is_heard_on_the_loop_though_it_was_asked_for_from_another_thread() -> None:
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    assert await asyncio.to_thread(hear_sigterm, loop, heard.set)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60.0):
        await heard.wait()


async def test_a_loop_that_has_closed_is_no_fault() -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    assert hear_sigterm(closed, lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)


async def test_a_process_whose_sigterm_is_not_rays_is_left_alone() -> None:
    def somebodys(_signum: int, _frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, somebodys)
    assert not hear_sigterm(asyncio.get_running_loop(), lambda: None)
    assert signal.getsignal(signal.SIGTERM) is somebodys
