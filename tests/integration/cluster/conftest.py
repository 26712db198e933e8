"""The one real cluster of the suite: Ray, gRPC, Redis and the real model, started by the command that users type.

Its home and its ports are its own, so a cluster that the developer runs beside it is not touched.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import processes
from cluster.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
NAME = "suite"
START_TIMEOUT_S = 420.0
COMMAND_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class CommandLine:
    """`pronghorn`, run as a user runs it, with a home of its own."""

    home: Path

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "cluster.cli", *arguments],
            env=self.environ,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @property
    def environ(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "RAY_ADDRESS")}
        return kept | {"PRONGHORN_HOME": str(self.home / "p"), "PYTHONPATH": os.pathsep.join(paths)}

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.home / "p", name)


@dataclass(frozen=True)
class RunningCluster:
    name: str
    url: str
    run_id: str
    temp_dir: Path
    pronghorn: CommandLine

    def status(self) -> dict[str, Any]:
        done = self.pronghorn("status", "--json", "--name", self.name)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float) -> None:
        """Fails where an orchestrator does not say so within `limit_s`."""
        give_up_s = time.monotonic() + limit_s
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as client:
            while not holds(status := client.get("/internal/status").json()):
                assert time.monotonic() < give_up_s, status
                time.sleep(0.1)  # the state of other processes, told by no event

    def wait_until_at_rest(self) -> None:
        def rests(status: dict[str, Any]) -> bool:
            nodes_rest = all(node["held_blocks"] == 0 and node["in_flight"] == 0 for node in status["nodes"])
            return status["in_flight"] == 0 and nodes_rest

        self.wait_until(rests, 30.0)

    def replica_pids(self, deployment: str) -> list[int]:
        title = f"ServeReplica:pronghorn:{deployment}"
        return [
            p.pid for p in processes.of_run(self.run_id, self.temp_dir) if any(title in word for word in p.cmdline())
        ]


def start(pronghorn: CommandLine, name: str, *options: str) -> RunningCluster:
    done = pronghorn(
        "up", "--detach", "--name", name, "--port=0", "--dashboard-port=0", *options, timeout_s=START_TIMEOUT_S
    )
    assert done.returncode == 0, f"the cluster did not start:\n{done.stdout}\n{done.stderr}"
    run, state = pronghorn.folder(name).run(), pronghorn.folder(name).state()
    assert run is not None and state is not None and state.url is not None
    return RunningCluster(name, state.url, run.run_id, Path(run.temp_dir), pronghorn)


def end(cluster: RunningCluster) -> None:
    """`pronghorn down`, and proof that nothing stays."""
    done = cluster.pronghorn("down", "--name", cluster.name)
    assert done.returncode == 0, done.stderr
    assert processes.of_run(cluster.run_id, cluster.temp_dir) == []
    assert not cluster.temp_dir.exists()
    assert not cluster.pronghorn.folder(cluster.name).path.exists()


@pytest.fixture(scope="session")
def pronghorn() -> Iterator[CommandLine]:
    # Not tmp_path: Unix sockets live below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as home:
        yield CommandLine(Path(home))


@pytest.fixture(scope="session")
def cluster(pronghorn: CommandLine) -> Iterator[RunningCluster]:
    """Two prefill nodes, so that one may be killed, and one decode node, whose cache a test may reason about."""
    started = start(pronghorn, NAME, "--prefill=2", "--decode=1", "--kv-memory=192MiB", "--drain-timeout=10")
    try:
        yield started
    finally:
        end(started)
