"""Starts that fail after much has been started: one line with the reason, exit code not 0, nothing left."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.running_cluster import START_TIMEOUT_S, CommandLine, Traces

pytestmark = pytest.mark.timeout(600)

NAME = "failing"


def fails(pronghorn: CommandLine, *options: str) -> str:
    """The line with the reason."""
    traces = Traces(NAME)
    done = pronghorn(
        "up", "--detach", "--name", NAME, "--port=0", "--dashboard-port=0", *options, timeout_s=START_TIMEOUT_S
    )
    assert done.returncode == 1
    assert not pronghorn.folder(NAME).path.exists()
    traces.assert_none()
    [line] = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    return line


def test_a_replica_that_cannot_be_made(pronghorn: CommandLine, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("this is no tokenizer")
    assert "tokenizer" in fails(pronghorn, f"--model={tmp_path}", "--kv-memory=16MiB")


@pytest.mark.chaos  # for its time
def test_a_start_that_takes_too_long(pronghorn: CommandLine) -> None:
    assert "in time" in fails(pronghorn, "--kv-memory=192MiB", "--startup-timeout=1")
