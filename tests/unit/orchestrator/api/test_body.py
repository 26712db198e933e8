import json

import pytest

from orchestrator.ports import GenerationJob
from tests.fakes.api_client import Served, error_of
from tests.fakes.scripted_generator import Step, spoken

POST = ("POST", "/v1/chat/completions")


@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    "raw",
    [b"", b"  ", b"{", b"[1]", b'"text"', b"null", b'{"temperature": NaN}', b"\xff\xfe", b'"\\ud800"', b"[" * 100_000],
)
async def test_what_is_no_json_object_is_a_400(raw: bytes) -> None:
    error = error_of(await Served().request(*POST, content=raw), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.conformance(15)
@pytest.mark.parametrize(
    ("field", "bound"),
    [
        ({"temperature": 2.5}, "2"),
        ({"temperature": "1"}, "number"),
        ({"temperature": True}, "number"),
        ({"top_p": -0.1}, "0"),
        ({"top_k": -2}, "-1"),
        ({"top_k": 1.5}, "integer"),
        ({"min_p": 1.1}, "1"),
        ({"repetition_penalty": 0}, "0"),
        ({"frequency_penalty": 3}, "2"),
        ({"presence_penalty": -3}, "-2"),
        ({"max_tokens": 0}, "1"),
        ({"max_completion_tokens": -1}, "1"),
        ({"min_tokens": -1}, "0"),
        ({"min_tokens": 1000}, "at most"),
        ({"seed": "abc"}, "integer"),
        ({"seed": 2**70}, "9223372036854775807"),
        ({"stop": ["a"] * 5}, "at most 4"),
        ({"stop": ""}, "at least one character"),
        ({"stop": "x" * 5000}, "at most 4096 characters"),
        ({"stop_token_ids": [1] * 1025}, "1024"),
        ({"stop": [1]}, "string"),
        ({"stop_token_ids": [257]}, "256"),
        ({"stream": "yes"}, "boolean"),
        ({"messages": []}, "at least 1"),
        ({"messages": "hi"}, "list"),
        ({"timeout": 0}, "0"),
        ({"timeout": 601}, "600"),
        ({"cache_salt": "x" * 513}, "512"),
        ({"target_endpoint": 1}, "string"),
        ({"chat_template_kwargs": []}, "dictionary"),
        ({"prompt_tokens": [257]}, "256"),
    ],
)
async def test_a_wrong_value_is_refused_with_field_value_and_bound(field, bound) -> None:
    served = Served()
    error = error_of(await served.chat(**field), 400)
    ((name, value),) = field.items()
    assert error["param"].startswith(name)
    assert name in error["message"]
    assert bound in error["message"]
    assert error["type"] == "invalid_request_error"
    if not isinstance(value, list | str):
        assert json.dumps(value) in error["message"]
    assert served.generator.runs == []


async def test_an_unknown_field_is_named() -> None:
    error = error_of(await Served().chat(temprature=1), 400)
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["audio"]},
    ],
)
async def test_a_known_field_that_is_not_supported_is_named_with_what_is(field) -> None:
    error = error_of(await Served().chat(**field), 400)
    assert error["param"] in field
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"content": "x"}, "messages[0].role", "missing"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", "none"),
        ({"role": "king", "content": "x"}, "messages[0].role", "king"),
        ({"role": "user", "content": 5}, "messages[0].content", "string"),
        ({"role": "user", "content": ["x"]}, "messages[0].content", "object"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content", "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", "text"),
        ("x", "messages[0]", "object"),
    ],
)
async def test_a_wrong_message_is_refused_with_its_place(message, param, says) -> None:
    error = error_of(await Served().chat(messages=[message]), 400)
    assert error["param"] == param
    assert says in error["message"]


async def test_stream_options_without_stream_are_refused() -> None:
    error = error_of(await Served().chat(stream_options={"include_usage": True}), 400)
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
async def test_the_content_type_does_not_matter(headers) -> None:
    raw = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert (await Served().request(*POST, content=raw, headers=headers)).status_code == 200


@pytest.mark.conformance(61)
async def test_a_body_that_announces_too_much_is_refused() -> None:
    served = Served(max_request_bytes=100)
    response = await served.request(*POST, content=b" " * 101)
    assert error_of(response, 413)["code"] == "request_too_large"
    assert "100" in response.json()["error"]["message"]
    assert response.headers["connection"] == "close"


async def test_a_body_in_chunks_is_refused_once_it_is_too_large() -> None:
    taken = 0

    async def chunks():
        nonlocal taken
        while True:  # without end: only a refusal stops it
            taken += 1
            yield b" " * 60

    response = await Served(max_request_bytes=100).request(*POST, content=chunks())
    error_of(response, 413)
    assert taken <= 3


@pytest.mark.field("sglang#30233")
async def test_a_prompt_of_the_models_length_is_served_and_one_token_more_reaches_nobody() -> None:
    asked: list[GenerationJob] = []

    def script(job: GenerationJob) -> list[Step]:
        asked.append(job)
        return spoken("x")

    served = Served(script)
    assert (await served.complete(prompt=[5] * 200, max_tokens=1)).status_code == 200
    assert len(asked) == 1
    error = error_of(await served.complete(prompt=[5] * 201, max_tokens=1), 400)
    assert error["code"] == "context_length_exceeded"
    assert len(asked) == 1


async def test_a_long_prompt_is_refused_with_both_numbers() -> None:
    served = Served()
    error = error_of(await served.chat(messages=[{"role": "user", "content": "x" * 300}]), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "318" in error["message"]
    assert "200" in error["message"]


async def test_an_unknown_model_is_a_404() -> None:
    error = error_of(await Served().chat(model="gpt-7"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-7" in error["message"]


async def test_a_template_that_refuses_is_a_400() -> None:
    served = Served(template="{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in error_of(await served.chat(), 400)["message"]
