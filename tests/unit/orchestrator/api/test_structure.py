"""What a chat body asks of the shape of its answer, as it reaches the node, and what is refused before any work."""

import json
from typing import Any

import pytest

from pipelines.text.grammar import GrammarCompiler, GrammarSource
from pipelines.types.text_context import TextContext
from tests.fakes.api_client import Served, error_of
from tests.fakes.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": None}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES: dict[str, Any] = {"tool_parser": "hermes", "max_length": 2000}


async def context_for(served: Served | None = None, **body: Any) -> TextContext:
    served = served or Served(**HERMES)
    response = await served.chat(**body)
    assert response.status_code == 200, response.text
    return served.generator.job.context


def accepts(context: TextContext, text: str) -> bool:
    """Whether the whole of `text` follows what is enforced on the context."""
    compiler = GrammarCompiler(byte_tokenizer().to_json(), VOCAB_SIZE, frozenset({END}))
    if context.grammar is not None:
        source = GrammarSource("grammar", context.grammar)
    else:
        assert context.json_schema is not None
        source = GrammarSource("json_schema", context.json_schema)
    matcher = compiler.compile(source).matcher()
    return matcher.consume(*compiler.tokens_of(text)) and matcher.complete


class TestResponseFormat:
    @pytest.mark.conformance(13, 65)
    @pytest.mark.parametrize(
        "format, good, bad",
        [
            ({"type": "json_object"}, '{"a": 1}', "[1]"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "[1]", "one"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, "[1]", "one"),
            (
                {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "integer"}}}}},
                '{"a": 1}',
                "7",
            ),
            ({"type": "regex", "regex": "[0-9]+/x"}, "12/x", "12"),
            ({"type": "grammar", "grammar": 'start: "a" | "b"'}, "b", "c"),
            ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, "b", "c"),
        ],
    )
    async def test_it_is_enforced_from_the_first_token(self, format: dict, good: str, bad: str) -> None:
        context = await context_for(response_format=format)
        assert context.grammar_state is None or context.grammar_state.enforced
        assert accepts(context, good)
        assert not accepts(context, bad)

    async def test_text_and_none_ask_for_nothing(self) -> None:
        for format in ({"type": "text"}, None):
            context = await context_for(response_format=format)
            assert (context.json_schema, context.grammar, context.grammar_state) == (None, None, None)

    @pytest.mark.parametrize(
        "format, param, says",
        [
            ({"type": "xml"}, "response_format.type", "xml"),
            ({"type": "json_schema"}, "response_format.json_schema", "must be given"),
            ({"type": "json_object", "regex": "a"}, "response_format.regex", "must be left out"),
            ({"type": "regex", "regex": "("}, "response_format", "unclosed group"),
            ({"type": "regex", "regex": "(a{999}){999}"}, "response_format", "998001 times"),
            ({"type": "grammar", "grammar": "start: x"}, "response_format", '"x"'),
            ({"type": "json_schema", "json_schema": {"schema": False}}, "response_format", "no text"),
            ({"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}, "response_format", "strnig"),
            ({"type": "json_schema", "json_schema": {"schema": [1]}}, "response_format.json_schema.schema", ""),
        ],
    )
    async def test_one_that_cannot_be_enforced_is_refused_with_the_reason(
        self, format: dict, param: str, says: str
    ) -> None:
        served = Served()
        error = error_of(await served.chat(response_format=format), 400)
        assert error["param"] is not None and error["param"].startswith(param)
        assert says in error["message"]
        assert served.generator.runs == []

    @pytest.mark.conformance(65)
    async def test_a_server_may_be_without_it_and_enforces_calls_all_the_same(self) -> None:
        served = Served(structured_output=False, **HERMES)
        error = error_of(await served.chat(response_format={"type": "json_object"}), 400)
        assert error["param"] == "response_format"
        context = await context_for(served, tools=[WEATHER], tool_choice="required")
        assert context.grammar is not None


class TestTools:
    @pytest.mark.conformance(65)
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    async def test_a_call_that_must_come_is_enforced_from_the_first_token(self, choice: Any) -> None:
        context = await context_for(tools=[WEATHER, NOW], tool_choice=choice, response_format={"type": "json_object"})
        assert context.grammar_state is not None and context.grammar_state.enforced
        assert accepts(context, CALL)
        assert not accepts(context, '{"a": 1}')
        other = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert accepts(context, other) is (choice == "required")
        assert accepts(context, CALL + "\n" + CALL)

    async def test_one_call_may_be_all(self) -> None:
        context = await context_for(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        assert accepts(context, CALL)
        assert not accepts(context, CALL + "\n" + CALL)

    @pytest.mark.conformance(65)
    async def test_calls_that_may_come_lie_dormant(self) -> None:
        context = await context_for(tools=[WEATHER], parallel_tool_calls=False)
        state = context.grammar_state
        assert state is not None
        assert (state.enforced, state.triggers, state.repeats) == (False, ["<tool_call>"], False)
        assert accepts(context, CALL)

    @pytest.mark.conformance(65)
    async def test_beside_a_format_either_may_come(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "integer"}}}}
        context = await context_for(tools=[WEATHER], response_format=schema)
        assert context.grammar_state is not None and context.grammar_state.enforced
        assert accepts(context, CALL)
        assert accepts(context, "[1, 2]")
        assert not accepts(context, "hello")

    async def test_no_tools_are_shown_where_none_may_be_called(self) -> None:
        for body in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}):
            context = await context_for(**body)
            assert context.grammar is None
            assert b"get_weather" not in bytes(t for t in context.tokens.prompt.tolist() if t < 256)

    async def test_a_template_without_tools_is_told_of_them_in_words(self) -> None:
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        context = await context_for(tools=[WEATHER], messages=messages)
        text = bytes(t for t in context.tokens.prompt.tolist() if t < 256).decode()
        assert text.startswith("[system]be kind\n\n# Tools")
        assert "get_weather" in text

    async def test_a_template_with_tools_gets_them_as_they_are(self) -> None:
        template = (
            "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
        )
        context = await context_for(Served(template=template, **HERMES), tools=[WEATHER, NOW])
        assert bytes(context.tokens.prompt.tolist()) == b"get_weather;now;hi"

    async def test_a_schema_that_cannot_be_enforced_takes_any_object_unless_it_is_strict(self) -> None:
        odd = json.loads(json.dumps(WEATHER))
        odd["function"]["parameters"] = {"type": "object", "not": {"required": ["x"]}}
        context = await context_for(tools=[odd, NOW], tool_choice="required")
        assert accepts(context, '<tool_call>\n{"name": "get_weather", "arguments": {"any": [1]}}\n</tool_call>')
        odd["function"]["strict"] = True
        error = error_of(await Served(**HERMES).chat(tools=[NOW, odd], tool_choice="required"), 400)
        assert error["param"] == "tools[1].function.parameters"

    @pytest.mark.parametrize(
        "body, param",
        [
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
            ({"tools": [WEATHER, WEATHER]}, "tools"),
            ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
            ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {"name": "x" * 1025}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
            ({"tools": [WEATHER], "response_format": {"type": "regex", "regex": "a"}}, "response_format"),
        ],
    )
    async def test_what_cannot_be_meant_is_refused(self, body: dict, param: str) -> None:
        served = Served(**HERMES)
        error = error_of(await served.chat(**body), 400)
        assert error["param"] is not None and error["param"].startswith(param)
        assert served.generator.runs == []

    async def test_without_a_parser_no_call_can_be_asked_for(self) -> None:
        error = error_of(await Served(tool_parser="none").chat(tools=[WEATHER], tool_choice="required"), 400)
        assert error["param"] == "tool_choice"


def asked(*ids: str, arguments: Any = '{"city": "Oslo"}') -> dict:
    calls = [{"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def reply(id: str) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": "rain"}


USER = {"role": "user", "content": "hi"}


class TestHistory:
    @pytest.mark.conformance(63)
    async def test_calls_and_replies_reach_the_template(self) -> None:
        template = (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
            "{{ m.role }}={{ m.content }};{% endfor %}{{ tools | length if tools else 0 }}"
        )
        served = Served(template=template, **HERMES)
        context = await context_for(served, messages=[USER, asked("a"), reply("a")], tools=[WEATHER])
        assert bytes(context.tokens.prompt.tolist()) == b"user=hi;get_weather(Oslo)assistant=;tool=rain;1"

    @pytest.mark.conformance(63)
    async def test_a_template_without_tools_gets_them_in_words(self) -> None:
        context = await context_for(messages=[USER, asked("a"), reply("a")])
        text = bytes(t for t in context.tokens.prompt.tolist() if t < 256).decode()
        assert text == f"[user]hi[assistant]{CALL}[user]<tool_response>\nrain\n</tool_response>[assistant]"

    @pytest.mark.conformance(63)
    @pytest.mark.parametrize(
        "messages, param",
        [
            ([USER, reply("a")], "messages[1].tool_call_id"),
            ([USER, asked("a"), reply("b")], "messages[2].tool_call_id"),
            ([USER, asked("a", "b"), reply("a"), USER], "messages[3]"),
            ([USER, asked("a"), reply("a"), USER, reply("a")], "messages[4].tool_call_id"),
            ([USER, asked("a", arguments="{no")], "messages[1].tool_calls[0].function.arguments"),
            ([USER, asked("a", arguments="[1]")], "messages[1].tool_calls[0].function.arguments"),
        ],
    )
    async def test_replies_that_answer_nothing_and_calls_unanswered_are_refused(
        self, messages: list, param: str
    ) -> None:
        error = error_of(await Served(**HERMES).chat(messages=messages), 400)
        assert error["param"] == param

    async def test_calls_of_the_last_turn_may_be_unanswered(self) -> None:
        assert await context_for(messages=[USER, asked("a", "b")])
        assert await context_for(messages=[USER, asked("a", "b"), reply("b"), reply("a"), USER])
        assert await context_for(messages=[USER, asked("a", arguments="")])
