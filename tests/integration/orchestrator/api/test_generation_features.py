"""Every feature of generation over HTTP, from the application through gRPC to nodes with a real model: apart, as one
node that prefills for itself, streamed and not."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode_nodes.engine import build as build_decode
from kvcache.memory import BlockMemory
from orchestrator.api.app import build_app
from orchestrator.api.served_models import ServedModels
from orchestrator.node_client import GrpcConnector
from orchestrator.replica import Replica
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.thread import ThreadEngine
from prefill_nodes.engine import build as build_prefill
from tests.fakes.api_client import events_of, settings
from tests.fakes.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tests.fakes.canary_engine import SEED
from tests.fakes.orchestrator_cluster import config
from tests.integration.nodes.rig import MODEL as NODES_MODEL
from tests.integration.nodes.rig import Node, at_rest, new_rig, orchestrator_identity
from tests.integration.orchestrator.test_real_nodes import until_usable

PROCESSORS = {"no_repeat": "tests.fakes.logits_processors:no_repeat"}
PROMPT = "Once upon a time <think>, there"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    shape = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **shape, **more)).save_pretrained(path)
    return path


def engine(kind: Any, folder: Path) -> ThreadEngine:
    settings = {"num_blocks": 64, "block_tokens": 4, "max_batch_size": 8, "max_batch_input_tokens": 8}
    made = EngineConfig(str(folder), NODES_MODEL, report_period_s=0.05, logits_processors=PROCESSORS, **settings)  # type: ignore[arg-type]  # names are fields
    memory = BlockMemory.create(made.total_blocks, layout_of(made).block_bytes)
    return ThreadEngine(kind, made, SEED, memory)


@asynccontextmanager
async def served(folder: Path, *, apart: bool) -> AsyncIterator[httpx.AsyncClient]:
    async with new_rig() as rig, AsyncExitStack() as stack:
        nodes: list[Node] = [await rig.decode_over(engine(build_decode, folder), stall_timeout_s=5.0)]
        if apart:
            nodes.append(await rig.prefill_over(engine(build_prefill, folder)))
        for node in nodes:
            await node.shell.check_health()
        connector = GrpcConnector(orchestrator_identity(), connect_timeout_s=5.0, send_queue_frames=1024)
        replica = Replica(config(model_name=NODES_MODEL), rig.registry, connector, rig.clock)
        replica.start()
        stack.push_async_callback(replica.stop)
        await until_usable(replica, len(nodes))
        told = settings(model_name=NODES_MODEL, logits_processors=frozenset(PROCESSORS))
        app = build_app(replica, replica, ServedModels([(byte_tokenizer(), told)]))
        transport = httpx.ASGITransport(app=app)
        yield await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))
        await at_rest(*nodes)
        if apart:
            assert nodes[0].counters.value("pull_committed") > 0


async def ask(client: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    response = await client.post(f"/v1/{route}", json={"max_tokens": 12} | body)
    assert response.status_code == 200, response.text
    return response


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 1.0, "seed": 0},
    "top_k, top_p, min_p": {"temperature": 1.4, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"temperature": 0.9, "seed": 4, "logprobs": 4},
    "echo": {"temperature": 0, "logprobs": 2, "echo": True},
    "echo of nothing more": {"logprobs": 1, "echo": True, "max_tokens": 0, "temperature": 0},
    "stop": {"temperature": 1.0, "seed": 9, "stop": ["a", "e", "0", "\x7f"]},
    "stop_token_ids": {"temperature": 1.0, "seed": 9, "stop_token_ids": list(range(0, 250, 5))},
    "min_tokens": {"temperature": 1.0, "seed": 9, "stop_token_ids": list(range(0, 250, 2)), "min_tokens": 6},
    "ignore_eos": {"temperature": 1.0, "seed": 9, "ignore_eos": True},
    "logit_bias": {"temperature": 1.0, "seed": 9, "logit_bias": {str(i): 6 for i in range(97, 123)}},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.3},
    "thinking_temperature": {"temperature": 0, "thinking_temperature": 1.5, "seed": 3},
    "logits_processors": {"temperature": 0, "logits_processors": ["no_repeat"]},
    "detokenize": {"temperature": 1.0, "seed": 2, "detokenize": False},
    "n": {"temperature": 1.0, "seed": 2, "n": 3, "logprobs": 1},
    "prompts": {"prompt": ["abc", "A rather longer prompt"], "n": 2, "temperature": 1.0, "seed": 2},
    "token lists": {"prompt": [[65, 66, 67], [68] * 9], "temperature": 1.0, "seed": 2},
}


def whole(response: httpx.Response) -> dict[int, dict[str, Any]]:
    return {choice["index"]: choice for choice in response.json()["choices"]}


def put_together(response: httpx.Response) -> dict[int, dict[str, Any]]:
    """The choices of a stream, as a whole answer would have them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in events_of(response.text)[:-1]:
        for choice in chunk["choices"]:
            seen = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            seen["text"] += choice["text"]
            seen["finish_reason"] = choice["finish_reason"]
            if "token_ids" in choice:
                seen["token_ids"] = seen.get("token_ids", []) + choice["token_ids"]
            if (told := choice["logprobs"]) is not None:
                before = seen["logprobs"] or {name: [] for name in told}
                seen["logprobs"] = {name: before[name] + told[name] for name in told}
    return found


def close(ours: Any, theirs: Any) -> bool:
    """Equal, log probabilities nearly."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) < 1e-4
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(close(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


@pytest.mark.conformance(58, 62, 69)
async def test_every_feature_is_equal_apart_and_together_streamed_and_not(folder: Path) -> None:
    answers: dict[bool, dict[str, dict[int, dict[str, Any]]]] = {True: {}, False: {}}
    for apart in (True, False):
        async with served(folder, apart=apart) as client:
            for name, body in BODIES.items():
                asked = {"prompt": PROMPT} | body
                answers[apart][name] = whole(await ask(client, "completions", **asked))
                streamed = put_together(await ask(client, "completions", **asked, stream=True))
                assert close(streamed, answers[apart][name]), name
    for name in BODIES:
        assert close(answers[True][name], answers[False][name]), name
    texts = {name: json.dumps(answer[0]) for name, answer in answers[True].items()}
    assert len(set(texts.values())) > len(BODIES) - 4, "features change something"


@pytest.mark.conformance(69)
async def test_an_echo_tells_what_transformers_thinks_of_the_prompt(folder: Path) -> None:
    async with served(folder, apart=True) as client:
        answer = whole(await ask(client, "completions", prompt=PROMPT, echo=True, logprobs=1, max_tokens=1))[0]
    tokens = list(PROMPT.encode())
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(folder).eval()(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()[np.arange(len(tokens) - 1), tokens[1:]]
    told = answer["logprobs"]["token_logprobs"]
    assert told[0] is None and len(told) == len(tokens) + 1
    assert np.abs(np.array(told[1:-1]) - expected).max() < 1e-3


async def test_choice_i_says_what_the_seed_plus_i_says(folder: Path) -> None:
    async with served(folder, apart=True) as client:
        options: dict[str, Any] = {"temperature": 1.0, "messages": [{"role": "user", "content": "hi"}]}
        together = whole(await ask(client, "chat/completions", **options, seed=2**53, n=4))
        for i in range(4):
            alone = whole(await ask(client, "chat/completions", **options, seed=2**53 + i))[0]
            assert together[i]["message"] == alone["message"]
