"""The supervisor of a cluster is killed, so that nobody drains anything: `up` and `down` see to what is left."""

import os
import signal

import httpx
import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, start
from tests.fakes.storm import MODEL

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]  # for its time

NAME = "killed"


def kill_supervisor(cluster: RunningCluster) -> None:
    state = cluster.pronghorn.folder(cluster.name).state()
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)


def test_up_takes_over_its_port_and_down_ends_what_is_left(pronghorn: CommandLine) -> None:
    first = start(pronghorn, NAME, "--kv-memory=192MiB")
    kill_supervisor(first)
    assert first.status()["phase"] == "abandoned"
    assert first.processes() != []

    second = start(pronghorn, NAME, "--kv-memory=192MiB", f"--port={first.port}")
    assert second.port == first.port
    assert first.processes() == []
    assert not first.temp_dir.exists()
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4}
    answer = httpx.post(f"{second.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 4

    kill_supervisor(second)
    done = pronghorn("down", "--name", NAME)
    assert done.returncode == 0, done.stderr
    second.assert_gone()
    assert "no cluster" in pronghorn("down", "--name", NAME).stdout
