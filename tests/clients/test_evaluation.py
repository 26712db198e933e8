"""lm-eval's API client beside transformers: log likelihoods by echoed prompts."""

from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoModelForCausalLM

from cluster.config import cache_dir, environment
from pipelines.models.fetch import default_model_folder

pytestmark = pytest.mark.timeout(300)

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a banana, of all things"),
    ("def add(a, b):\n    return", " a + b"),
    ("Water boils at one hundred degrees", " Celsius at sea level."),
]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


@pytest.mark.conformance(69)
def test_log_likelihoods_are_those_of_transformers(server: Any) -> None:
    lm = LocalCompletionsAPI(
        base_url=f"{server.v1}/completions",
        model=server.model,
        tokenizer=str(default_model_folder(cache_dir(environment()))),
        tokenizer_backend="huggingface",
        batch_size=2,
        max_retries=1,
    )
    found = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    folder = default_model_folder(cache_dir(environment()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (context, continuation), (told, greedy) in zip(PAIRS, found, strict=True):
        before, after = lm._encode_pair(context, continuation)
        with torch.inference_mode():
            logits = model(torch.tensor([before + after])).logits[0].double()[len(before) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).numpy()[np.arange(len(after)), after].sum()
        assert abs(told - expected) < 1e-3
        assert greedy == (logits.argmax(dim=-1).tolist() == after)


def test_texts_are_generated_until_their_stop(server: Any) -> None:
    lm = LocalCompletionsAPI(
        base_url=f"{server.v1}/completions",
        model=server.model,
        tokenizer=str(default_model_folder(cache_dir(environment()))),
        tokenizer_backend="huggingface",
        tokenized_requests=False,
        max_retries=1,
    )
    asked = [("Once upon a time", {"until": ["."], "max_gen_toks": 32})]
    (text,) = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert text and "." not in text
