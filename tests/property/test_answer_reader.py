"""Thinking, content and calls of one answer are the same however it is cut (vllm#30671)."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.reading import AnswerReader, Read, Reading
from pipelines.text.reasoning_parser import REASONING_FORMATS
from pipelines.text.tool_format import TOOL_FORMATS

scraps = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "b"}}', "[TOOL_CALLS]"]
    + ["f[ARGS]{}", "[f(a=1)]", "<|python_tag|>", " ", "\n", "text", "{", "}", '"']
)
texts = st.lists(scraps | st.text(max_size=4), max_size=9).map("".join)


def read(format: str, thinking: bool, pieces: list[str]) -> Read:
    ids = count()
    reader = AnswerReader(
        Reading(REASONING_FORMATS["think"], thinking, TOOL_FORMATS[format]), lambda: f"call_{next(ids)}"
    )
    return Read.merged([*(reader.push(piece) for piece in pieces), reader.finish()])


@pytest.mark.conformance(63, 64)
@given(text=texts, format=st.sampled_from(list(TOOL_FORMATS)), thinking=st.booleans(), at=st.integers(0, 60))
def test_where_an_answer_is_cut_changes_nothing(text: str, format: str, thinking: bool, at: int) -> None:
    whole = read(format, thinking, [text])
    assert read(format, thinking, [text[:at], text[at:]]) == whole
    assert read(format, thinking, list(text)) == whole
