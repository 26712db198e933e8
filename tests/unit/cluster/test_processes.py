import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import processes

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
HOLDS_A_FILE = f"f = open(__import__('sys').argv[1], 'w'); {SLEEP}"

RUN, OTHER_RUN = f"a-{uuid.uuid4().hex}", f"b-{uuid.uuid4().hex}"
"""Of this process alone: the whole machine is looked through for them."""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def start(
    started: list[subprocess.Popen[bytes]],
    code: str,
    *argv: str,
    run_id: str | None = None,
    environ: dict[str, str] | None = None,
) -> int:
    if environ is None:
        environ = {"PATH": os.defpath} | ({} if run_id is None else {processes.RUN_VARIABLE: run_id})
    child = subprocess.Popen([sys.executable, "-c", code, *argv], env=environ, stdout=subprocess.PIPE)
    started.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child.pid


def test_only_the_processes_of_the_run_are_found(started: list[subprocess.Popen[bytes]]) -> None:
    ours = start(started, SLEEP, run_id=RUN)
    start(started, SLEEP, run_id=OTHER_RUN)
    start(started, SLEEP)
    assert [p.pid for p in processes.of_run(RUN, None)] == [ours]


def test_a_process_that_lost_its_environment_is_known_by_its_files(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    ours = start(started, HOLDS_A_FILE, str(tmp_path / "log"), environ={})
    start(started, SLEEP, environ={})
    assert [p.pid for p in processes.of_run(RUN, tmp_path)] == [ours]


def test_somebody_who_reads_a_file_there_is_left_alone(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    start(started, HOLDS_A_FILE, str(tmp_path / "log"))
    assert processes.of_run(RUN, tmp_path) == []


def test_what_does_not_end_when_asked_is_killed(started: list[subprocess.Popen[bytes]]) -> None:
    start(started, DEAF, run_id=RUN)
    start(started, SLEEP, run_id=RUN)
    assert processes.end_run(RUN, None, grace_s=0.2) == []
    assert all(child.poll() is not None for child in started)


def test_a_zombie_has_ended(started: list[subprocess.Popen[bytes]]) -> None:
    start(started, SLEEP, run_id=RUN)
    started[0].kill()
    os.waitid(os.P_PID, started[0].pid, os.WEXITED | os.WNOWAIT)
    assert processes.of_run(RUN, None) == []
