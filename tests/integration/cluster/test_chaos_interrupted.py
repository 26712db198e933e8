"""A run of scenarios that is interrupted puts everything right before it ends, however often it is told."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

END_S = 60.0

PROGRAM = """
import asyncio, signal, sys
from cluster.chaos.commands import to_its_end

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs these tests behind nohup has it ignored, and so it stays

async def work():
    try:
        print("working", flush=True)
        await asyncio.Event().wait()
    finally:
        print("putting it right", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("all is right", flush=True)

to_its_end(work())
"""


@contextmanager
def working() -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "working\n"
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_has_it_put_right_and_the_next_do_not_disturb_that(first: signal.Signals) -> None:
    with working() as (process, said_to, heard):
        process.send_signal(first)
        assert heard.readline() == "putting it right\n"
        for again in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(again)
        said_to.write("\n")
        said_to.flush()
        assert heard.readline() == "all is right\n"
        assert process.wait(END_S) != 0
        assert process.stderr is not None and "KeyboardInterrupt" in process.stderr.read()
