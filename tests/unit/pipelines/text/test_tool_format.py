"""Every format: its grammar takes what its parser reads as calls, whatever was allowed."""

import json
from itertools import count

import numpy as np
import pytest

from pipelines.text.grammar import GrammarCompiler, GrammarSource
from pipelines.text.tool_format import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    TOOL_FORMATS,
    Tool,
    ToolFormat,
    tool_format,
)
from pipelines.text.tool_parsers.tool_parser import ToolCallDelta, joined
from pronghorn.errors import ConfigurationError
from tests.fakes.tokenizer_folder import tiny_tokenizer

END = 2
WEATHER = Tool(
    "get_weather",
    {
        "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/day"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "tells the weather",
)
NOW = Tool("now", {})
UNITS = Tool("units", {"type": "object", "properties": {"unit": {"enum": ["k", "m"]}, "exact": {"type": "boolean"}}})


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_str(), 320, frozenset({END}))


def grammar(compiler: GrammarCompiler, format: ToolFormat, tools: list[Tool], several: bool = True) -> GrammarSource:
    return GrammarSource("grammar", "start: calls\n" + format.calls(tools, compiler.literal, several))


def drawn(compiler: GrammarCompiler, source: GrammarSource, seed: int) -> str:
    """A random text of the grammar; "" where it found no end."""
    rng = np.random.default_rng(seed)
    matcher, text = compiler.compile(source).matcher(), b""
    for step in range(500):
        allowed = matcher.allowed()
        choices = np.flatnonzero(allowed[3:]) + 3
        if allowed[END] and (step > 60 or rng.random() < 0.3 or len(choices) == 0):
            return text.decode()
        closing = [c for c in choices if compiler.token_bytes(int(c)) in (b'"', b"}", b"]", b")")] if step > 60 else []
        token = int(rng.choice(closing or choices))
        assert matcher.consume(token)
        text += compiler.token_bytes(token)
    return ""


@pytest.mark.conformance(65)
@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
def test_whatever_the_grammar_allows_is_read_as_calls_of_the_tools(
    format: ToolFormat, compiler: GrammarCompiler
) -> None:
    tools = {tool.name: tool for tool in (WEATHER, NOW, UNITS)}
    source = grammar(compiler, format, list(tools.values()))
    found = 0
    for seed in range(12):
        if not (text := drawn(compiler, source, seed)):
            continue
        ids = count()
        parser = format.new_parser(lambda ids=ids: f"call_{next(ids)}")
        parts = joined(parser.push(text) + parser.finish())
        assert parts and all(isinstance(part, ToolCallDelta) for part in parts), text
        for part in parts:
            assert isinstance(part, ToolCallDelta) and part.name in tools
            assert isinstance(json.loads(part.arguments), dict)
            found += 1
    assert found > 6


@pytest.mark.parametrize(
    "format, text, accepted",
    [
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>', True),
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 9', False),
        (HERMES, '<tool_call>\n{"name": "other"', False),
        (LLAMA3_JSON, '{"name": "get_weather", "parameters": {"city": "Oslo"}}', True),
        (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]', True),
        (PYTHONIC, '[get_weather(city="Oslo", days=3)]', True),
        (PYTHONIC, '[get_weather(days=3)]', False),
    ],
)  # fmt: skip
def test_a_grammar_takes_calls_of_the_tools_alone(
    format: ToolFormat, text: str, accepted: bool, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(grammar(compiler, format, [WEATHER])).matcher()
    assert (matcher.consume(*compiler.tokens_of(text)) and matcher.complete) is accepted


@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
def test_one_call_is_all_where_no_others_are_allowed(format: ToolFormat, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(grammar(compiler, format, [NOW], several=False)).matcher()
    call = format.writes("now", "{}")
    assert matcher.consume(*compiler.tokens_of(call)), call
    assert matcher.stopped


@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
def test_a_call_written_into_a_history_is_read_as_that_call(format: ToolFormat) -> None:
    parser = format.new_parser(lambda: "id")
    (part,) = joined(parser.push(format.writes("f", '{"a": [1, null]}')) + parser.finish())
    assert isinstance(part, ToolCallDelta)
    assert (part.name, json.loads(part.arguments)) == ("f", {"a": [1, None]})
    assert "get_weather" in format.asks([WEATHER])


def test_the_format_is_named_or_found_in_the_template() -> None:
    assert tool_format("auto", "... <tool_call> ...") is HERMES
    assert tool_format("auto", "[TOOL_CALLS]") is MISTRAL
    assert tool_format("auto", "<|im_start|>") is HERMES
    assert tool_format("auto", None) is LLAMA3_JSON
    assert tool_format("none", "<tool_call>") is None
    assert tool_format("pythonic", None) is PYTHONIC
    with pytest.raises(ConfigurationError, match="tool_parser"):
        tool_format("xml", None)
