import json
from collections.abc import Callable
from itertools import count

import pytest

from pipelines.text.tool_parsers.hermes import HermesParser
from pipelines.text.tool_parsers.llama3_json import Llama3JsonParser
from pipelines.text.tool_parsers.mistral import MistralParser
from pipelines.text.tool_parsers.pythonic import PythonicParser
from pipelines.text.tool_parsers.tool_parser import NewId, Part, ToolCallDelta, ToolParser

Made = Callable[[NewId], ToolParser]


def parsed(make: Made, text: str) -> tuple[str, list[tuple[str, object]]]:
    """The content and the calls of a whole answer."""
    ids = count()
    parser = make(lambda: f"call_{next(ids)}")
    return read(parser.push(text) + parser.finish())


def read(parts: list[Part]) -> tuple[str, list[tuple[str, object]]]:
    content = "".join(part for part in parts if isinstance(part, str))
    calls: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, ToolCallDelta):
            name, arguments = calls.setdefault(part.index, [part.name or "", ""])
            calls[part.index] = [name, arguments + part.arguments]
    return content, [(name, as_json(arguments)) for name, arguments in calls.values()]


def as_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_blanks_around_arguments_are_none_of_them() -> None:
    parser = HermesParser(lambda: "id")
    parts = parser.push('<tool_call>{"name": "f", "arguments":  {"a": 1} \n }</tool_call>') + parser.finish()
    assert "".join(part.arguments for part in parts if isinstance(part, ToolCallDelta)) == '{"a": 1}'


WEATHER = ("weather", {"city": "Oslo", "days": 3})
NOW = ("now", {})
SAY = ("say", {"t": "</tool_call>"})


@pytest.mark.conformance(63)
@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("hello <b>", "hello <b>", []),
        ("  hello \n", "  hello \n", []),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [NOW]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
        ('<tool_call>{"arguments": {"city": "Oslo", "days": 3}, "name": "weather"}</tool_call>', "", [WEATHER]),
        ('<tool_call>{"name":"weather","arguments":"{\\"city\\":\\"Oslo\\",\\"days\\":3}"}</tool_call>', "", [WEATHER]),
        (
            'I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n',
            "I look.",
            [NOW, WEATHER],
        ),
        ('<tool_call>{"name": "say", "arguments": {"t": "</tool_call>"}}</tool_call>', "", [SAY]),
        ("<tool_call>I would rather not</tool_call>", "I would rather not", []),
        ('<tool_call>{"city": "Oslo"}</tool_call> then', '{"city": "Oslo"} then', []),
        ('<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        ('<tool_call>{"name": "wea', '{"name": "wea', []),
        ("a <tool_ca", "a <tool_ca", []),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list) -> None:
    assert parsed(HermesParser, text) == (content, calls)


@pytest.mark.conformance(63)
@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("hello {x}", "hello {x}", []),
        ('{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}', "", [WEATHER]),
        ('<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
        ('{"name": "now", "parameters": {}}; {"name": "now", "arguments": {}}', "", [NOW, NOW]),
        ('{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
        ('Sure. <|python_tag|>{"name": "now", "parameters": {}}', "Sure.", [NOW]),
        ('Sure. {"name": "now", "parameters": {}}', 'Sure. {"name": "now", "parameters": {}}', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"name": "Bob"}', '{"name": "Bob"}', []),
        ("{not json", "{not json", []),
        ('  {"a": [1, {"b": 2}]} and more', '  {"a": [1, {"b": 2}]} and more', []),
    ],
)
def test_llama_3_json(text: str, content: str, calls: list) -> None:
    assert parsed(Llama3JsonParser, text) == (content, calls)


@pytest.mark.conformance(63)
@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("hello [x]", "hello [x]", []),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]', "", [WEATHER]),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', "", [NOW, NOW]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}', "", [WEATHER]),
        ('ok [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}', "ok", [NOW, WEATHER]),
        ('[TOOL_CALLS]now{}', "", [NOW]),
        ("[TOOL_CALLS] no thanks!", "no thanks!", []),
    ],
)  # fmt: skip
def test_mistral(text: str, content: str, calls: list) -> None:
    found, found_calls = parsed(MistralParser, text)
    assert (found.strip(), found_calls) == (content, calls)


@pytest.mark.conformance(63)
@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("hello [x]", "hello [x]", []),
        ('[weather(city="Oslo", days=3), now()]', "", [WEATHER, NOW]),
        ("[now()]\n", "", [NOW]),
        ("[f(a=[1, (2)], b={'k': None}, c=True, d='it\\'s )')]", "", [
            ("f", {"a": [1, 2], "b": {"k": None}, "c": True, "d": "it's )"}),
        ]),
        ("[1, 2]", "[1, 2]", []),
        ("[x for x in y]", "[x for x in y]", []),
        ("[f(__import__('os'))]", "[f(__import__('os'))]", []),
        ("[f(a=g())]", "[f(a=g())]", []),
        (r"[f(a='\d')]", "", [("f", {"a": r"\d"})]),
        ("[now(), weather(", "weather(", [NOW]),
    ],
)  # fmt: skip
def test_pythonic(text: str, content: str, calls: list) -> None:
    assert parsed(PythonicParser, text) == (content, calls)
