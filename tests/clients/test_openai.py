"""OpenAI's own SDK: chat, completions and responses; waiting, streaming, asynchronous."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(300)

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
FLAT_TOOL: Any = {"type": "function", "strict": True, **TOOL["function"]}


class Verdict(BaseModel):
    answer: Literal["Paris", "London"]
    certain: bool


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def options(server: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": ASK, "temperature": 0, "max_completion_tokens": 16}


@pytest.mark.conformance(58)
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**options)
    assert "Paris" in (whole.choices[0].message.content or "")
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_requests_of_an_asynchronous_client_run_beside_each_other(server: Any, options: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=120) as client:
        alone = (await client.chat.completions.create(**options)).choices[0].message.content

        async def streamed() -> str:
            chunks = await client.chat.completions.create(**options, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

        assert set(await asyncio.gather(*(streamed() for _ in range(8)))) == {alone}


@pytest.mark.conformance(65)
def test_a_parsed_answer_is_of_its_model(client: openai.OpenAI, options: dict[str, Any]) -> None:
    answer = client.chat.completions.parse(**options | {"max_completion_tokens": 64}, response_format=Verdict)
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(**options | {"max_completion_tokens": 64}, response_format=Verdict) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == answer.choices[0].message.parsed


@pytest.mark.conformance(63)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_valid_and_streams_as_a_whole(client: openai.OpenAI, options: Any, choice: Any) -> None:
    asked = options | {
        "max_completion_tokens": 64,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("weather", call.function.arguments)
    reply = {"role": "tool", "tool_call_id": call.id, "content": "20 C, dry"}
    history = [*ASK, whole.choices[0].message.model_dump(exclude_none=True), reply]
    assert client.chat.completions.create(**options | {"messages": history}).choices[0].message.content


@pytest.mark.conformance(69)
def test_log_probabilities_and_choices(client: openai.OpenAI, options: dict[str, Any]) -> None:
    sampled = options | {"temperature": 1.0, "seed": 11}
    answer = client.chat.completions.create(**sampled, n=3, logprobs=True, top_logprobs=2)
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        content = choice.logprobs.content
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)
        assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    assert (
        client.chat.completions.create(**sampled, n=3).choices[2].message.content == answer.choices[2].message.content
    )


def test_responses_whole_and_streamed(client: openai.OpenAI, server: Any, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": server.model, "input": ASK, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    assert whole.output_text == client.chat.completions.create(**options).choices[0].message.content
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_responses_parse_and_call(client: openai.OpenAI, server: Any) -> None:
    asked: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": 64}
    choice: Any = {"type": "function", "name": "weather"}
    parsed = client.responses.parse(**asked, input=ASK, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)
    tools: dict[str, Any] = {"tools": [FLAT_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    called = client.responses.create(**asked, **tools, input=ASK)
    (call, *_) = [item for item in called.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    calls = [item.model_dump(exclude_none=True) for item in called.output]
    replies = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "20 C"}
        for item in called.output
        if item.type == "function_call"
    ]
    assert client.responses.create(**asked, input=[*ASK, *calls, *replies]).output_text


def test_models_and_errors(client: openai.OpenAI, server: Any, options: dict[str, Any]) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**options | {"model": "gpt-none"})
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**options | {"temperature": 9})
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt="long " * 100_000)
    assert long.value.code == "context_length_exceeded"
