"""What clients of the real cluster may ask of a generation, beside transformers and beside itself."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import cache_dir, environment
from pipelines.models.fetch import default_model_folder
from tests.fakes.running_cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPTS = [list(range(500, 533)), list(range(3000, 3040, 3))]
MODEL = "smollm2-135m-instruct"


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.conformance(69)
def test_log_likelihoods_of_an_echo_are_those_of_transformers(client: openai.OpenAI) -> None:
    """As evaluation harnesses ask: several prompts of token ids, echoed, one token more."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1}
    answer = client.completions.create(model=MODEL, prompt=PROMPTS, **options)
    folder = default_model_folder(cache_dir(environment()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        told = choice.logprobs
        assert told.token_logprobs[0] is None and len(told.token_logprobs) == len(prompt) + 1
        expected = torch.log_softmax(logits.double(), dim=-1).numpy()[np.arange(len(prompt) - 1), prompt[1:]]
        assert np.abs(np.array(told.token_logprobs[1:-1]) - expected).max() < 1e-3
        greedy = logits.argmax(dim=-1)[:-1].tolist()
        best = [max(top.values()) for top in told.top_logprobs[1:-1]]
        found = [a == b for a, b in zip(told.token_logprobs[1:-1], best, strict=True)]
        assert found == [a == b for a, b in zip(greedy, prompt[1:], strict=True)]
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", len(PROMPTS))


def test_choice_i_says_what_the_seed_plus_i_says(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0}
    alone = [client.completions.create(**options, seed=40 + i).choices[0].text for i in range(3)]
    together = client.completions.create(**options, seed=40, n=3)
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(**options, seed=40, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == alone


def test_the_first_token_has_log_probabilities_too(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"model": MODEL, "messages": question, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    ended = answer.choices[0].finish_reason == "stop"  # by a token that is counted, and not told
    assert len(content) == answer.usage.completion_tokens - ended > 4
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in content)
    chunks = client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True)
    told = [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in told] == [entry.token for entry in content]


BODIES: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["er", "th"]},
    "logit_bias": {"logit_bias": {"28": -100, "30": 2}},
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    "min_p": {"temperature": 1.0, "seed": 3, "extra_body": {"min_p": 0.05, "top_k": 50}},
    "min_tokens": {"extra_body": {"min_tokens": 9, "stop_token_ids": [30, 28, 198]}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "thinking_temperature": {"extra_body": {"thinking_temperature": 1.5}},
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
    "echo": {"echo": True, "logprobs": 2},
}


@pytest.mark.conformance(58, 62)
@pytest.mark.parametrize("feature", BODIES)
def test_a_stream_of_several_prompts_says_what_the_whole_answer_says(client: openai.OpenAI, feature: str) -> None:
    prompts = ["Once upon a time", "The capital of France is", "def main():"]
    options: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 12, "temperature": 0, **BODIES[feature]}
    whole = client.completions.create(**options)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    logprobs: dict[int, list[Any]] = {i: [] for i in texts}
    ends: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [texts[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [ends[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]
    for choice in whole.choices:
        told = choice.logprobs.token_logprobs if choice.logprobs else []
        assert logprobs[choice.index] == pytest.approx(told, abs=1e-4)
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.conformance(57)
def test_chat_takes_tokens_and_gives_tokens_and_the_newer_limit_wins(cluster: RunningCluster) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "unused"}],
        "prompt_tokens": PROMPTS[0],
        "max_tokens": 9,
        "max_completion_tokens": 4,
        "detokenize": False,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120).json()
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), choice["message"]["content"]) == (4, "")
    assert answer["usage"]["prompt_tokens"] == len(PROMPTS[0])
