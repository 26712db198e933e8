"""How answers with tool calls and thinking are told, whole and as a stream."""

import json
from typing import Any

import pytest

from pipelines.types.status import GenerationStatus
from tests.fakes.api_client import Served, error_of, events_of
from tests.fakes.byte_tokenizer import END
from tests.fakes.scripted_generator import Tokens, spoken
from tests.unit.orchestrator.api.test_structure import CALL, HERMES, NOW, WEATHER

THINKING = HERMES | {"reasoning_parser": "think"}
TWO_CALLS = f"I look.\n{CALL}\n{CALL}\n"


async def whole(text: str, settings: dict | None = None, **body: Any) -> dict[str, Any]:
    served = Served(spoken(text, end=[END]), **(settings or HERMES))
    response = await served.chat(**body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(text: str, settings: dict | None = None, pieces: int = 1, **body: Any) -> tuple[dict, list[dict]]:
    """The message that the deltas make, and the choices of all chunks."""
    data = text.encode()
    script = [Tokens(data[at : at + pieces]) for at in range(0, len(data), pieces)]
    served = Served([*script, Tokens([END], GenerationStatus.END_OF_SEQUENCE)], **(settings or HERMES))
    response = await served.chat(stream=True, **body)
    choices = [c for event in events_of(response.text) if event != "[DONE]" for c in event["choices"]]
    message: dict[str, Any] = {}
    for choice in choices:
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                _join_calls(message.setdefault("tool_calls", []), value)
            elif key in ("role", "refusal"):
                message[key] = value
            else:
                message[key] = message.get(key, "") + value
    message["finish_reason"] = choices[-1]["finish_reason"]
    return message, choices


def _join_calls(calls: list[dict], entries: list[dict]) -> None:
    assert len({entry["index"] for entry in entries}) == len(entries), "one entry per index per chunk"
    for entry in entries:
        if entry["index"] == len(calls):
            calls.append(json.loads(json.dumps(entry)))
        else:
            calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]


def named(message: dict) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]


@pytest.mark.conformance(63)
async def test_a_whole_answer_tells_its_calls() -> None:
    body = await whole(TWO_CALLS, tools=[WEATHER])
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert named(choice["message"]) == [("get_weather", {"city": "Oslo"})] * 2
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    alone = await whole(CALL, tools=[WEATHER])
    assert alone["choices"][0]["message"]["content"] is None


@pytest.mark.field("vllm#30671")
@pytest.mark.conformance(63)
@pytest.mark.parametrize("pieces", [1, 3, 7, 1000])
async def test_deltas_join_to_the_whole_answer(pieces: int) -> None:
    message, choices = await streamed(TWO_CALLS, pieces=pieces, tools=[WEATHER])
    expected = (await whole(TWO_CALLS, tools=[WEATHER]))["choices"][0]
    assert message["content"] == expected["message"]["content"]
    assert named(message) == named(expected["message"])
    assert message["finish_reason"] == expected["finish_reason"] == "tool_calls"
    assert choices[0]["delta"]["role"] == "assistant"


async def test_arguments_are_told_while_they_are_written() -> None:
    _, choices = await streamed(CALL, tools=[WEATHER])
    pieces = [c["delta"]["tool_calls"][0]["function"]["arguments"] for c in choices if "tool_calls" in c["delta"]]
    assert len(pieces) > 5


async def test_without_tools_marks_are_content() -> None:
    body = await whole(CALL)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.conformance(63)
async def test_a_call_that_cannot_be_read_is_content_without_its_marks() -> None:
    body = await whole("<tool_call>no call</tool_call>", tools=[NOW])
    assert body["choices"][0]["message"]["content"] == "no call"
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_a_call_cut_off_by_the_limit_says_so() -> None:
    script = spoken(CALL[:50], status=GenerationStatus.MAXIMUM_LENGTH)
    body = (await Served(script, **HERMES).chat(tools=[WEATHER])).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


THOUGHT = "<think>\nhm, yes\n</think>\n\nIt is so."


@pytest.mark.conformance(62, 64)
@pytest.mark.parametrize("key, emit", [("reasoning", False), ("reasoning_content", True)])
async def test_thinking_is_told_under_one_name(key: str, emit: bool) -> None:
    settings = THINKING | {"emit_reasoning_content": emit}
    body = await whole(THOUGHT, settings)
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "It is so.", "refusal": None, key: "hm, yes",
    }  # fmt: skip
    thinking_tokens = len("<think>\nhm, yes\n</think>")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": pytest.approx(thinking_tokens, abs=7)}
    message, choices = await streamed(THOUGHT, settings)
    assert (message[key], message["content"]) == ("hm, yes", "It is so.")
    assert not any("content" in c["delta"] and key in c["delta"] for c in choices)
    assert "<think>" not in json.dumps(choices)


@pytest.mark.field("vllm#30671")
@pytest.mark.conformance(64)
@pytest.mark.parametrize("pieces", [1, 5, 1000])
async def test_with_thinking_and_calls_deltas_join_to_the_whole_answer(pieces: int) -> None:
    """vllm#30671: streamed content held what the whole answer did not."""
    text = f"<think>I should look.</think>\n\nI look.\n{CALL}"
    message, _ = await streamed(text, THINKING, pieces, tools=[WEATHER])
    expected = (await whole(text, THINKING, tools=[WEATHER]))["choices"][0]["message"]
    assert message["reasoning"] == expected["reasoning"] == "I should look."
    assert message["content"] == expected["content"] == "I look."
    assert named(message) == named(expected) == [("get_weather", {"city": "Oslo"})]


@pytest.mark.conformance(64)
async def test_thinking_without_an_answer_is_the_answer() -> None:
    body = await whole("<think>all I say</think>", THINKING)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "all I say", "refusal": None}
    cut = (await Served(spoken("<think>all I", status=GenerationStatus.MAXIMUM_LENGTH), **THINKING).chat()).json()
    assert cut["choices"][0]["message"]["reasoning"] == "all I"
    assert cut["choices"][0]["message"]["content"] == ""


async def test_thinking_may_be_left_out_or_left_in() -> None:
    excluded = await whole(THOUGHT, THINKING, reasoning={"exclude": True, "enabled": True})
    assert excluded["choices"][0]["message"] == {"role": "assistant", "content": "It is so.", "refusal": None}
    unsplit = await whole(THOUGHT, THINKING, reasoning_split=False)
    assert unsplit["choices"][0]["message"]["content"] == THOUGHT
    message, _ = await streamed(THOUGHT, THINKING, reasoning={"exclude": True, "enabled": True})
    assert message["content"] == "It is so." and "reasoning" not in message


async def test_a_prompt_that_opens_the_thinking_is_noticed() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>\n{% endif %}"
    served = Served(spoken("hm</think>so", end=[END]), template=template, **THINKING)
    body = (await served.chat(reasoning={"enabled": True, "max_tokens": 9})).json()
    assert body["choices"][0]["message"]["reasoning"] == "hm"
    context = served.generator.job.context
    assert context.in_reasoning_phase
    assert context.reasoning is not None and context.reasoning.max_tokens == 9


TEMPLATE = "{{ enable_thinking }}/{{ thinking }}/{{ reasoning_effort }}/{{ messages[0].content }}"


@pytest.mark.conformance(64)
@pytest.mark.parametrize(
    "body, rendered",
    [
        ({}, "//"),
        ({"reasoning": {}}, "False/False/"),
        ({"reasoning": {"enabled": False}}, "False/False/"),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "True/True/low"),
        ({"reasoning_effort": "none"}, "False/False/"),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, "//high"),
        ({"thinking": {"type": "disabled"}}, "False/False/"),
        ({"thinking": {"type": "adaptive"}}, "True/True/"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "//low"),
    ],
)
async def test_what_is_asked_of_thinking_reaches_the_template(body: dict, rendered: str) -> None:
    served = Served(template=TEMPLATE, **THINKING)
    assert (await served.chat(**body)).status_code == 200
    assert bytes(served.generator.job.context.tokens.prompt.tolist()).decode() == f"{rendered}/hi"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    ],
)
async def test_what_is_not_known_of_thinking_is_refused(body: dict, param: str) -> None:
    assert error_of(await Served(**THINKING).chat(**body), 400)["param"] == param


async def test_a_budget_needs_a_model_that_thinks() -> None:
    error = error_of(await Served().chat(reasoning={"max_tokens": 4}), 400)
    assert error["param"] == "reasoning.max_tokens"
