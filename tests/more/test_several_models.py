"""Two models in one cluster, with the same shape and other weights: each answers as its own, and what is done to the
nodes of one leaves the other's alone."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.running_cluster import CommandLine, RunningCluster, end, start
from tests.fakes.tiny_model_folder import write_tiny_model

pytestmark = pytest.mark.timeout(900)

PROMPT = "The same prompt for both, long enough for a few blocks of each: " * 2
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_tiny_model(tmp_path_factory.mktemp(name), seed) for name, seed in (("one", 7), ("two", 8))}


@pytest.fixture
def cluster(pronghorn: CommandLine, folders: dict[str, Path]) -> Iterator[RunningCluster]:
    models = [f"--model={name}={folder}" for name, folder in folders.items()]
    limits = ["--option=service.models.two.max_length=256", "--kv-memory=16MiB", "--threads=1"]
    running = start(pronghorn, "two-models", *models, *limits)
    with contextlib.ExitStack() as stack:
        stack.callback(end, running)
        yield running


def answer(cluster: RunningCluster, model: str, **more: Any) -> tuple[str, int]:
    """What it says, and how many of the prompt's tokens were cached."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    said = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
    assert said.status_code == 200, said.text
    found = said.json()
    assert found["model"] == model
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def refusal(cluster: RunningCluster, **body: Any) -> dict[str, Any]:
    said = httpx.post(
        f"{cluster.url}/v1/completions", json={"prompt": PROMPT, **body}, timeout=LIMIT_S, trust_env=False
    )
    return {"status": said.status_code, **said.json()["error"]}


def nodes(cluster: RunningCluster, model: str) -> dict[str, str]:
    """Lives of the model's healthy nodes by name."""
    status = httpx.get(f"{cluster.url}/internal/status", timeout=LIMIT_S, trust_env=False).json()
    return {node["name"]: node["incarnation"] for node in status["nodes"] if node["model"] == model and node["healthy"]}


def command(cluster: RunningCluster, *words: str) -> str:
    done = cluster.pronghorn(*words, "--name", cluster.name, timeout_s=600.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def refused(cluster: RunningCluster, *words: str) -> str:
    done = cluster.pronghorn(*words, "--name", cluster.name, timeout_s=600.0)
    assert done.returncode == 1, done.stdout
    return " ".join((done.stdout + done.stderr).split())


def test_two_models_answer_apart_and_one_is_scaled_and_drained_without_the_other(cluster: RunningCluster) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models", timeout=LIMIT_S, trust_env=False).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("one", 1024), ("two", 256)]

    answers = {model: answer(cluster, model) for model in ("one", "two")}
    assert answers["one"][0] != answers["two"][0]
    assert {cached for _, cached in answers.values()} == {0}
    for model, (text, _) in answers.items():
        again, cached = answer(cluster, model)
        assert again == text and cached > 0

    assert command(cluster, "chat", "hello", "--model=one", "--max-tokens=8") != ""
    assert command(cluster, "chat", "hello", "--model=two", "--max-tokens=8") != ""
    assert "serves one, two; say which with --model" in refused(cluster, "chat", "hello")
    unknown = refusal(cluster, model="three")
    assert (unknown["status"], unknown["code"]) == (404, "model_not_found")
    assert "served: 'one', 'two'" in unknown["message"]
    (prefill_of_two,) = [name for name in nodes(cluster, "two") if name.startswith("prefill-two-")]
    foreign = refusal(cluster, model="one", target_endpoint=prefill_of_two)
    assert (foreign["status"], foreign["code"]) == (404, "endpoint_not_found")
    assert "is a node of the model 'two', and the request is for 'one'" in foreign["message"]

    before, others = nodes(cluster, "one"), nodes(cluster, "two")
    assert "say which with --model" in refused(cluster, "scale", "--decode=2")
    command(cluster, "scale", "--model=one", "--decode=2")
    cluster.wait_until(lambda _: len(nodes(cluster, "one")) == 3, LIMIT_S)
    grown = nodes(cluster, "one")
    assert before.items() <= grown.items() and nodes(cluster, "two") == others

    leaving = next(name for name in before if name.startswith("decode-one-"))
    command(cluster, "drain", leaving, "--no-replace")
    cluster.wait_until(lambda _: leaving not in nodes(cluster, "one"), LIMIT_S)
    last = next(name for name in nodes(cluster, "one") if name.startswith("decode-one-"))
    assert "is the last decode node of one" in refused(cluster, "drain", last, "--no-replace")
    assert nodes(cluster, "two") == others
    assert [answer(cluster, model)[0] for model in answers] == [text for text, _ in answers.values()]

    old = nodes(cluster, "one") | nodes(cluster, "two")
    command(cluster, "redeploy")
    cluster.wait_until(lambda _: not old.keys() & (nodes(cluster, "one") | nodes(cluster, "two")).keys(), LIMIT_S)
    cluster.wait_until(lambda status: all(model["ready"] for model in status["models"]), LIMIT_S)
    assert [len(nodes(cluster, model)) for model in answers] == [2, 2]
    assert [answer(cluster, model)[0] for model in answers] == [text for text, _ in answers.values()]

    cluster.wait_until_at_rest()
    status = cluster.status()
    assert {model["name"]: (model["ready"], model["pools"]) for model in status["models"]} == {
        "one": (True, {"prefill": 1, "decode": 1}),
        "two": (True, {"prefill": 1, "decode": 1}),
    }
    cluster.assert_ledger_clean()
