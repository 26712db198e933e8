"""Clusters of other shapes than the default: without prefill nodes, behind Serve's own proxy, in a Ray that runs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import processes
from cluster.chaos.machines import RayCluster, machines
from tests.fakes.running_cluster import ROOT, CommandLine, RunningCluster, Traces, end, start
from tests.fakes.storm import MODEL
from tests.fakes.tiny_model_folder import write_tiny_model
from tests.fakes.valkey_server import ValkeyServer

pytestmark = pytest.mark.timeout(600)


def complete(cluster: RunningCluster, prompt: str = "Once upon a time", tokens: int = 4) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens


def test_decode_nodes_alone_behind_serves_own_proxy(pronghorn: CommandLine) -> None:
    cluster = start(pronghorn, "alone", "--prefill=0", "--decode=2", "--edge=serve", "--kv-memory=192MiB")
    try:
        complete(cluster)
        status = cluster.status()
        assert (status["edge"], status["pools"]) == ("serve", {"prefill": 0, "decode": 2})
        assert not [item for item in status["listening"] if item["process"] == "haproxy"]
        chat = pronghorn("chat", "What is the capital of France?", "--name", cluster.name, "--max-tokens=32")
        assert "Paris" in chat.stdout
    finally:
        end(cluster)


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with machines("joined", gpus=(1, 1), settings={"PYTHONPATH": str(ROOT)}) as running:
        yield running


@pytest.fixture
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pv-", dir="/tmp") as folder:
        server = ValkeyServer(Path(folder))
        server.start()
        yield server.url
        server.stop()


def of_serve(run_id: str) -> list[list[str]]:
    lines = [p.cmdline() for p in processes.of_run(run_id, None)]
    return [line for line in lines if any("Serve" in word or "Proxy" in word for word in line)]


@pytest.mark.chaos  # for its time; test_machines joins one too
def test_a_ray_cluster_of_machines_is_joined_and_left_as_it_was(
    pronghorn: CommandLine, ray: RayCluster, redis_url: str
) -> None:
    token = {name: value for name, value in ray.environ.items() if name.startswith("RAY_AUTH")}
    joining = CommandLine(pronghorn.home, token)
    options = (f"--address={ray.address}", f"--redis-url={redis_url}", "--prefill=2", "--kv-memory=192MiB")
    cluster = start(joining, "guest", *options)
    complete(cluster)
    machines = {node["address"].rsplit(":", 1)[0] for node in cluster.status()["nodes"]}
    # Where nodes go is Ray's choice, and all may go to one machine; an address of neither would be a laptop's own.
    assert machines and machines <= {"127.0.0.2", "127.0.0.3"}

    again = joining("up", "--detach", "--name", "another", "--port=0", *options)
    assert again.returncode == 1
    assert "already has pronghorn" in again.stdout
    complete(cluster)
    end(cluster)
    assert of_serve("joined") == []

    killed = start(joining, "guest", *options)
    state = joining.folder("guest").state()
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    done = joining("down", "--name", "guest")
    assert done.returncode == 0, done.stderr
    killed.assert_gone()
    assert of_serve("joined") == []


@pytest.mark.chaos  # for its time
@pytest.mark.parametrize(
    ("placement", "machine"),
    [
        ({"labels": {"machine": "3"}}, "127.0.0.3"),
        ({"labels": {"machine": "!3"}}, "127.0.0.2"),
        ({"resources": {"node:127.0.0.3": 0.01}}, "127.0.0.3"),
        ({"resources": {"node:127.0.0.2": 0.01}}, "127.0.0.2"),
    ],
)
def test_a_node_takes_a_gpu_of_the_machine_that_its_pool_asks_for(
    ray: RayCluster, tmp_path: Path, placement: dict[str, Any], machine: str
) -> None:
    service = {
        "model_path": str(write_tiny_model(tmp_path / "tiny")),
        "model_name": "tiny",
        "redis_url": "redis://127.0.0.1",
        "key_prefix": "k",
        "device": "cuda",
        "placement": {"decode": placement},
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.gpu_nodes", ray.address, json.dumps(service), "1"],
        env=ray.environ,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    standing = json.loads(done.stdout)
    assert (standing["address"].rsplit(":", 1)[0], standing["gpu"]) == (machine, "0")


def test_a_ray_cluster_that_wants_a_token_is_refused_in_time(
    pronghorn: CommandLine, ray: RayCluster, redis_url: str
) -> None:
    traces = Traces("stranger")
    options = ("--port=0", f"--address={ray.address}", f"--redis-url={redis_url}")
    done = pronghorn("up", "--name=stranger", *options, timeout_s=60.0)
    assert done.returncode == 1
    assert "RAY_AUTH_TOKEN_PATH" in done.stdout
    traces.assert_none()
