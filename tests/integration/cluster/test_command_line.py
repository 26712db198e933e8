"""The commands on a running cluster, and starts that are refused: one line, not 0, nothing left."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, Traces

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def refused(pronghorn: CommandLine, *options: str) -> str:
    traces = Traces("refused")
    done = pronghorn("up", "--name", "refused", *options)
    assert done.returncode == 1
    assert done.stdout.count("\n") <= 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert not pronghorn.folder("refused").path.exists()
    traces.assert_none()
    return lines[0]


def test_a_port_in_use(pronghorn: CommandLine, taken_port: int) -> None:
    assert f"port {taken_port}" in refused(pronghorn, f"--port={taken_port}")


def test_a_missing_model(pronghorn: CommandLine) -> None:
    assert "no model at /nowhere" in refused(pronghorn, "--port=0", "--model=/nowhere")


def test_an_unsupported_architecture(pronghorn: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "'BertModel' is not supported" in refused(pronghorn, "--port=0", f"--model={tmp_path}")


def test_a_damaged_model(pronghorn: CommandLine, tmp_path: Path) -> None:
    model = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(model | sizes))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert f"{tmp_path}/model.safetensors is damaged" in refused(pronghorn, "--port=0", f"--model={tmp_path}")


def test_a_redis_that_is_not_there(pronghorn: CommandLine, taken_port: int) -> None:
    line = refused(pronghorn, "--port=0", f"--redis-url=redis://:secret@127.0.0.1:{taken_port}/0")
    assert "Redis cannot be reached" in line
    assert "secret" not in line


def test_joining_without_a_redis(pronghorn: CommandLine) -> None:
    assert "--redis-url" in refused(pronghorn, "--address=auto")


@pytest.mark.model
def test_more_memory_than_there_is(pronghorn: CommandLine) -> None:
    line = refused(pronghorn, "--port=0", "--kv-memory=100000GiB")
    assert "ask for 204800000 MiB" in line
    assert "are available" in line


def test_nothing_to_end_is_no_error(pronghorn: CommandLine) -> None:
    done = pronghorn("down", "--name", "nobody")
    assert done.returncode == 0
    assert "no cluster 'nobody'" in done.stdout


def test_help_tells_every_option_with_its_default(pronghorn: CommandLine) -> None:
    wide = CommandLine(pronghorn.home, {"COLUMNS": "300"})
    lines = [line for line in wide("up", "--help").stdout.splitlines() if re.search(r" --[a-z]", line)]
    assert len(lines) > 20
    assert [line for line in lines if "[default:" not in line and "--help" not in line] == []


@pytest.mark.timeout(60)
def test_a_start_can_be_seen_and_ended_while_it_still_looks_at_the_model(
    pronghorn: CommandLine, tmp_path: Path
) -> None:
    traces = Traces("slow")
    os.mkfifo(tmp_path / "config.json")
    command = pronghorn.command("up", "--name", "slow", "--port=0", f"--model={tmp_path}")
    with subprocess.Popen(command, env=pronghorn.environ, cwd=pronghorn.home, stdout=subprocess.PIPE) as starting:
        with (tmp_path / "config.json").open("wb"):  # waits until the model is looked at
            assert "starting" in pronghorn("status", "--name", "slow").stdout
            assert pronghorn("down", "--name", "slow").returncode == 0
            assert starting.wait(30.0) != 0
    assert not pronghorn.folder("slow").path.exists()
    traces.assert_none()


@pytest.mark.cluster
def test_a_second_start_under_the_same_name_says_so(cluster: RunningCluster) -> None:
    done = cluster.pronghorn("up", "--name", cluster.name, "--port=0")
    assert done.returncode == 1
    assert "is running already" in done.stderr


@pytest.mark.cluster
def test_chat_streams_an_answer(cluster: RunningCluster) -> None:
    done = cluster.pronghorn("chat", "What is the capital of France?", "--name", cluster.name, "--max-tokens=32")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.cluster
def test_status_tells_pools_nodes_blocks_and_redis(cluster: RunningCluster) -> None:
    status = cluster.status()
    assert status["phase"] == "ready"
    assert status["pools"] == {"prefill": 2, "decode": 1}
    assert sorted(node["name"] for node in status["nodes"]) == status["redis"]["registered"]
    assert status["blocks"]["free"] + status["blocks"]["held"] == status["blocks"]["total"]
    shown = cluster.pronghorn("status", "--name", cluster.name)
    for node in status["nodes"]:
        assert node["name"] in shown.stdout
        assert node["address"] in shown.stdout


@pytest.mark.cluster
def test_the_cluster_computes_what_one_process_computes(cluster: RunningCluster) -> None:
    done = cluster.pronghorn("verify", "parity", "--quick", "--name", cluster.name, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all agree" in done.stdout
