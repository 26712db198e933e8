"""`/v1/responses`: what it takes, what it answers, and how its events tell the same."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pipelines.types.status import GenerationStatus
from pronghorn.errors import NodeLost, Overloaded
from tests.fakes.api_client import MODEL, Served, error_of
from tests.fakes.scripted_generator import Fail, Tokens, spoken

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"at": "Rome"}}</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def respond(served: Served, **body: Any) -> Any:
    return await served.request("POST", "/v1/responses", json={"model": MODEL, "input": "hi"} | body)


def events_of(text: str) -> list[dict[str, Any]]:
    """Each is one that the official client knows; numbered from 0."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


async def test_a_text_is_answered_with_a_message() -> None:
    answer = await respond(Served(spoken("héllo")), instructions="be kind", temperature=0.5, metadata={"a": "b"})
    parsed = Response.model_validate(answer.json())
    assert (parsed.output_text, parsed.status, parsed.instructions) == ("héllo", "completed", "be kind")
    assert parsed.usage is not None and parsed.usage.output_tokens == len("héllo".encode())
    assert (parsed.temperature, parsed.metadata, answer.json()["store"]) == (0.5, {"a": "b"}, False)


async def test_an_answer_that_meets_its_limit_is_incomplete() -> None:
    script = spoken("abc", status=GenerationStatus.MAXIMUM_LENGTH)
    served = Served(script)
    answer = (await respond(served, max_output_tokens=3)).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    last = events_of((await respond(Served(script), stream=True)).text)[-1]
    assert last["type"] == "response.incomplete"


@pytest.mark.parametrize("script", ["hello", f"well{CALL}", f"{CALL}{CALL}", f"<think>hm</think>so{CALL}", ""])
async def test_the_events_build_the_whole_answer(script: str) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto"}
    settings = {"tool_parser": "hermes", "reasoning_parser": "think", "max_length": 5000}
    whole = (await respond(Served(spoken(script), **settings), **options)).json()
    events = events_of((await respond(Served(spoken(script), **settings), **options, stream=True)).text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and kinds.count("response.completed") == 1
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(done):
        deltas = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == said
    calls = script.count("<tool_call>")
    expected = (["reasoning"] if "think" in script else []) + ["function_call"] * calls
    assert [item["type"] for item in done if item["type"] != "message"] == expected
    assert [item["name"] for item in done if item["type"] == "function_call"] == ["weather"] * script.count(
        "<tool_call>"
    )


async def test_log_probabilities_come_where_they_are_included() -> None:
    served = Served()
    await respond(served, include=["message.output_text.logprobs"], top_logprobs=3)
    assert served.generator.job.context.log_probabilities == 3


async def test_items_become_turns() -> None:
    turn = "[{{ m.role }}|{{ m.content }}|{{ m.tool_calls | length if m.tool_calls }}]"
    template = "{% for m in messages %}" + turn + "{% endfor %}{# knows tools #}"
    served = Served(template=template, max_length=5000)
    await respond(
        served,
        instructions="rules",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "ok", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {"role": "developer", "content": "now"},
        ],
    )
    prompt = bytes(int(t) for t in served.generator.job.context.tokens.all).decode()
    assert prompt.startswith("[system|rules|]") and "[assistant|ok|2][tool|one|][tool|two|][system|now|]" in prompt


@pytest.mark.conformance(61)
@pytest.mark.parametrize(
    ("field", "param", "word"),
    [
        ({"input": ""}, "input", "character"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]}]},
            None,
            "image",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "string"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].tool_call_id", "call"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "false"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type", "function"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "given"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"nonsense": 1}, "nonsense", "not a field"),
        ({"n": 2}, "n", "not supported"),
    ],
)
async def test_what_is_not_taken_is_refused_by_its_own_name(
    field: dict[str, Any], param: str | None, word: str
) -> None:
    error = error_of(await respond(Served(), **field), 400)
    assert param is None or error["param"] == param
    assert word in error["message"]


@pytest.mark.conformance(61)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_error_is_an_http_error(stream: bool) -> None:
    error_of(await respond(Served([Fail(Overloaded("full"))]), stream=stream), 429)


async def test_a_late_error_is_told_in_the_stream() -> None:
    text = (await respond(Served([Tokens(b"h"), Fail(NodeLost("decode-1 is gone"))]), stream=True)).text
    events = events_of(text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "decode-1 is gone" in events[-2]["message"]
    assert events[-1]["response"]["error"]["message"] == events[-2]["message"]
