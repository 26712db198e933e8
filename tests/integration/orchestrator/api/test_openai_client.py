"""The official client against the application over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pydantic
import pytest

from pipelines.types.status import GenerationStatus
from pronghorn.errors import DeadlineExceeded, NodeLost, Overloaded, Unavailable
from tests.fakes.api_client import MODEL, Served
from tests.fakes.http_server import served_on_loopback
from tests.fakes.scripted_generator import Fail, Stall, Tokens, spoken

MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served_on_loopback(served.app) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.conformance(58)
async def test_chat_whole_and_streamed_give_the_same_text() -> None:
    async with client_of(Served(spoken("héllo 😀"))) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "héllo 😀"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "héllo 😀"
    assert chunks[-1].usage == whole.usage


async def test_the_clients_own_accumulator_understands_the_stream() -> None:
    served = Served(spoken("hello"))
    async with client_of(served) as client, client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "hello"


@pytest.mark.conformance(58)
async def test_completions_whole_and_streamed() -> None:
    script = spoken("abc", status=GenerationStatus.MAXIMUM_LENGTH)
    async with client_of(Served(script)) as client:
        whole = await client.completions.create(model=MODEL, prompt=["x", "y"])
        stream = await client.completions.create(model=MODEL, prompt=["x", "y"], stream=True)
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert [c.text for c in whole.choices] == texts == ["abc", "abc"]
    assert {c.finish_reason for c in whole.choices} == {"length"}


async def test_extensions_pass_through_the_extra_body() -> None:
    served = Served(spoken("x"))
    async with client_of(served) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            extra_body={"top_k": 3, "target_endpoint": "prefill-1", "dkv_cache_hint": {"version": 1}},
            extra_headers={"X-Target-Endpoint": "prefill-2"},
        )
    assert served.generator.job.target_endpoint == "prefill-2"
    assert served.generator.job.hint == {"version": 1}
    assert served.generator.job.context.sampling_params.top_k == 3


async def test_models() -> None:
    async with client_of(Served()) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Overloaded("full"), openai.RateLimitError),
        (Unavailable("nobody"), openai.InternalServerError),
        (DeadlineExceeded("late"), openai.InternalServerError),
        (RuntimeError("bug"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_are_the_clients_own_exceptions(error, raised, stream, caplog) -> None:
    async with client_of(Served([Fail(error)])) as client:
        with pytest.raises(raised) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
    assert caught.value.code
    assert caught.value.type in ("api_error", "rate_limit_error")
    assert caught.value.request_id


async def test_a_wrong_field_is_a_bad_request_with_its_name() -> None:
    async with client_of(Served()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.param == "temperature"
    assert unknown.value.code == "model_not_found"


async def test_an_error_after_the_first_token_is_raised_by_the_client() -> None:
    async with client_of(Served([Tokens(b"h"), Fail(NodeLost("decode-1 is gone"))])) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="decode-1 is gone"):
            _ = [chunk async for chunk in stream]


async def test_heartbeats_do_not_disturb_the_client() -> None:
    stall = Stall()
    served = Served([Tokens(b"h"), stall, *spoken("i")], heartbeat_s=0.01)
    async with client_of(served) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            stall.until.set()
    assert text == "hi"


class Person(pydantic.BaseModel):
    name: str
    age: int


TOOL = openai.pydantic_function_tool(Person, name="note_person")
NOTED = '{"name": "note_person", "arguments": {"name": "Ada", "age": 36}}'


@pytest.mark.conformance(65)
async def test_the_clients_own_models_come_back_parsed() -> None:
    served = Served(spoken('{"name": "Ada", "age": 36}'))
    async with client_of(served) as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    assert served.generator.job.context.json_schema is not None


@pytest.mark.conformance(63)
async def test_tools_go_round_with_the_clients_own_accumulator() -> None:
    served = Served(spoken(f"<tool_call>\n{NOTED}\n</tool_call>"), tool_parser="hermes", max_length=4000)
    async with client_of(served) as client:
        whole = await client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required"
        )
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL]) as stream:
            final = await stream.get_final_completion()
        (call,) = whole.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Person(name="Ada", age=36)
        (streamed,) = final.choices[0].message.tool_calls or []
        assert streamed.function.parsed_arguments == call.function.parsed_arguments
        assert whole.choices[0].finish_reason == final.choices[0].finish_reason == "tool_calls"
        history = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
        await client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])


async def test_a_schema_that_cannot_be_enforced_is_a_bad_request_with_the_reason() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}}}
    async with client_of(Served()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=format)
    assert caught.value.code == "invalid_grammar"
    assert caught.value.param == "response_format"
