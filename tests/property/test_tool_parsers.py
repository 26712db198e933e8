"""However an answer is cut, its deltas join to the same content and calls, and nothing makes a parser fail."""

import json
from itertools import count
from keyword import iskeyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.text.tool_parsers.hermes import HermesParser
from pipelines.text.tool_parsers.llama3_json import Llama3JsonParser
from pipelines.text.tool_parsers.mistral import MistralParser
from pipelines.text.tool_parsers.pythonic import PythonicParser
from pipelines.text.tool_parsers.tool_parser import Part, ToolParser, joined

PARSERS = [HermesParser, Llama3JsonParser, MistralParser, PythonicParser]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))
calls = st.tuples(names, st.dictionaries(names, values, max_size=3))


def hermes(name: str, arguments: dict) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def llama(name: str, arguments: dict) -> str:
    return f'<|python_tag|>{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


def mistral(name: str, arguments: dict) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def pythonic(name: str, arguments: dict) -> str:
    return f"[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]"


scraps = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", '"', "\\",
     '{"name": "f", "arguments": ', '"name"', ":", ",", ";", " ", "\n", "f(", ")", "a=1", "'", "é"]
)  # fmt: skip
writers = st.sampled_from([hermes, llama, mistral, pythonic])
written = st.builds(lambda call, write: write(*call), calls, writers)
texts = st.lists(scraps | st.text(max_size=5) | written, max_size=8).map("".join)


def all_of(parser: ToolParser, pieces: list[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return joined(parts + parser.finish())


def new(make: type[ToolParser]) -> ToolParser:
    ids = count()
    return make(lambda: f"call_{next(ids)}")


@pytest.mark.conformance(63)
@pytest.mark.parametrize("make", PARSERS)
@given(text=texts, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_where_an_answer_is_cut_changes_nothing(make: type[ToolParser], text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    whole = all_of(new(make), [text])
    assert all_of(new(make), pieces) == whole
    assert all_of(new(make), list(text)) == whole


@pytest.mark.parametrize("make, write", list(zip(PARSERS, [hermes, llama, mistral, pythonic], strict=True)))
@given(call=calls)
def test_a_call_is_read_as_it_was_written(make: type[ToolParser], write: object, call: tuple[str, dict]) -> None:
    parts = all_of(new(make), list(write(*call)))  # type: ignore[operator]
    (part,) = parts
    assert not isinstance(part, str)
    assert (part.name, json.loads(part.arguments)) == call
