"""What a client of the real cluster sees, through HAProxy and the `openai` package."""

import json
import socket
import stat
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.fakes.running_cluster import RunningCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def served(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_it_answers_a_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=served(client), messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[call-overload]  # a plain dict is a message
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    options = {"model": served(client), "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]  # options are a plain dict
    stream = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]  # options are a plain dict
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    options = {"model": served(client), "prompt": "Once upon a time", "temperature": 1.0, "seed": 7, "max_tokens": 16}
    first, second = (client.completions.create(**options) for _ in range(2))  # type: ignore[call-overload]  # options are a plain dict
    assert first.choices[0].text == second.choices[0].text


@pytest.mark.field("vllm#44607")
def test_the_prompt_came_from_a_prefill_node_and_a_repeated_one_from_the_cache(cluster: RunningCluster) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": list(range(1000, 1050)), "max_tokens": 4, "temperature": 0}
    # Named, since a decode node may find it quicker to compute so short a prompt itself.
    body["target_endpoint"] = next(node["name"] for node in cluster.status()["nodes"] if node["role"] == "prefill")
    before = counter(cluster, "pull_committed")
    first, second = (httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).json() for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert counter(cluster, "pull_committed") >= before + 1


def test_an_unknown_model_is_refused_as_openai_does(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-9", prompt="hi")
    assert refused.value.code == "model_not_found"


def test_too_long_a_prompt_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"9000.*\d{4}|\d{4}.*9000") as refused:
        client.completions.create(model=served(client), prompt=[1] * 9000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


def test_a_named_endpoint_is_obeyed_and_an_unknown_one_refused(cluster: RunningCluster, client: openai.OpenAI) -> None:
    name = next(node["name"] for node in cluster.status()["nodes"] if node["role"] == "prefill")
    options = {"model": served(client), "prompt": "hello", "max_tokens": 2}
    assert client.completions.create(**options, extra_body={"target_endpoint": name}).choices[0].text  # type: ignore[call-overload]  # options are a plain dict
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(**options, extra_body={"target_endpoint": "nobody"})  # type: ignore[call-overload]  # options are a plain dict
    assert refused.value.code == "endpoint_not_found"


def test_only_loopback_takes_http_grpc_and_redis(cluster: RunningCluster) -> None:
    status = cluster.status()
    ours = [status["url"].removeprefix("http://"), status["redis"]["url"].removeprefix("redis://").split("/")[0]]
    ours += [node["address"] for node in status["nodes"]]
    assert {address.rsplit(":", 1)[0] for address in ours} == {"127.0.0.1"}
    listening = {item["address"].rsplit(":", 1)[1]: item["address"] for item in status["listening"]}
    for address in ours:
        assert "127.0.0.1" in listening[address.rsplit(":", 1)[1]]


def test_a_client_that_leaves_frees_everything(cluster: RunningCluster) -> None:
    url = httpx.URL(cluster.url)
    body = json.dumps({"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 2000, "stream": True})
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        assert b"200" in connection.recv(4096)
    cluster.wait_until_at_rest()


def counter(cluster: RunningCluster, name: str) -> int:
    return sum(node["counters"].get(name, 0) for node in cluster.status()["nodes"] if node["role"] == "decode")


def test_no_secret_lies_where_others_can_read_it(cluster: RunningCluster) -> None:
    folder = cluster.pronghorn.folder(cluster.name)
    state = folder.state()
    assert state is not None and state.redis_url is not None
    secrets = [folder.token_path.read_text(), httpx.URL(state.redis_url).password]
    assert all(len(secret) > 20 for secret in secrets)
    for process in cluster.processes():
        arguments = " ".join(process.cmdline())
        assert not [secret for secret in secrets if secret in arguments], arguments
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.path, cluster.temp_dir)} == {0o700}
    assert cluster.status()["redis"]["url"].find(secrets[1]) == -1


def test_ray_neither_shows_nor_logs_the_password_of_redis(cluster: RunningCluster) -> None:
    folder = cluster.pronghorn.folder(cluster.name)
    state = folder.state()
    assert state is not None and state.redis_url is not None
    password = httpx.URL(state.redis_url).password
    shown = httpx.get(
        f"{state.dashboard_url}/api/serve/applications/",
        headers={"Authorization": f"Bearer {folder.token_path.read_text()}"},
        timeout=60.0,
        trust_env=False,
    )
    assert shown.json()["applications"]["pronghorn"]["deployed_app_config"]["args"]["redis_url"] == ""
    assert password not in shown.text
    logs = [path for path in (cluster.temp_dir / "r").rglob("*") if path.suffix in (".log", ".out", ".err")]
    assert any("with arguments" in path.read_text(errors="replace") for path in logs), logs
    assert [path for path in logs if password in path.read_text(errors="replace")] == []
