import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.text.reasoning_parser import (
    REASONING_FORMATS,
    ReasoningParser,
    Split,
    opens_thinking,
    reasoning_format,
)
from pronghorn.errors import ConfigurationError

THINK = REASONING_FORMATS["think"]


def split(text: str, thinking: bool = False, pieces: list[str] | None = None) -> tuple[str, str]:
    parser = ReasoningParser(THINK, thinking)
    splits: list[Split] = [parser.push(piece) for piece in pieces or [text]] + [parser.finish()]
    return "".join(s.reasoning for s in splits), "".join(s.content for s in splits)


@pytest.mark.conformance(64)
@pytest.mark.parametrize(
    "text, thinking, expected",
    [
        ("<think>\nhm, yes \n</think>\n\nso it is", False, ("hm, yes", "so it is")),
        ("hm</think>so", True, ("hm", "so")),
        ("  \n<think>hm</think>so", False, ("hm", "so")),
        ("plain", False, ("", "plain")),
        ("  plain ", False, ("", "  plain ")),
        ("so <think>hm</think>", False, ("", "so <think>hm</think>")),
        ("<thin", False, ("", "<thin")),
        ("<thinner>", False, ("", "<thinner>")),
        ("still at it </thi", True, ("still at it </thi", "")),
        ("<think></think>", False, ("", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_thinking_and_answer_are_told_apart(text: str, thinking: bool, expected: tuple[str, str]) -> None:
    assert split(text, thinking) == expected
    assert split(text, thinking, list(text)) == expected


scraps = st.sampled_from(["<think>", "</think>", "<th", "</th", " ", "\n", "a", ">"])
texts = st.lists(scraps | st.text(max_size=3), max_size=9).map("".join)


@pytest.mark.conformance(64)
@given(text=texts, thinking=st.booleans(), at=st.integers(0, 40))
def test_where_the_text_is_cut_changes_nothing(text: str, thinking: bool, at: int) -> None:
    whole = split(text, thinking)
    assert split(text, thinking, [text[:at], text[at:]]) == whole
    assert split(text, thinking, list(text) or [""]) == whole


@pytest.mark.parametrize(
    "prompt, opened",
    [
        ("user: hi\nassistant:\n<think>\n", True),
        ("user: hi\nassistant:\n<think>\n\n</think>\n\n", False),
        ("user: <think>\nassistant:", False),
        ("assistant:", False),
    ],
)
def test_a_prompt_may_have_opened_the_thinking(prompt: str, opened: bool) -> None:
    assert opens_thinking(prompt, THINK) is opened
    assert opens_thinking(prompt, REASONING_FORMATS["deepseek_r1"]) is not prompt.rstrip().endswith("</think>")


def test_the_format_is_named_or_found_in_the_template() -> None:
    assert reasoning_format("auto", "{% if x %}</think>{% endif %}") is THINK
    assert reasoning_format("auto", "plain") is None
    assert reasoning_format("auto", None) is None
    assert reasoning_format("none", "</think>") is None
    assert reasoning_format("seed", None) is REASONING_FORMATS["seed"]
    with pytest.raises(ConfigurationError, match="reasoning_parser"):
        reasoning_format("thick", None)
