"""Detokenizer and stop strings: how the tokens or the text are cut into pieces changes nothing."""

import functools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.text.detokenizer import IncrementalDetokenizer
from pipelines.text.stop_strings import StopStringScanner
from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.sampling import SamplingParamsGenerationConfigDefaults
from tests.fakes.tokenizer_folder import tiny_tokenizer


@functools.cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer(
        tiny_tokenizer(),
        vocab_size=300,
        eos_ids=frozenset(),
        template=None,
        generation_defaults=SamplingParamsGenerationConfigDefaults(),
    )


def cut(data: st.DataObject, length: int) -> list[slice]:
    edges = sorted(data.draw(st.lists(st.integers(0, length), max_size=8)))
    return [slice(a, b) for a, b in zip([0, *edges], [*edges, length], strict=True)]


def detokenize(tokens: Sequence[int], pieces: list[slice]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer())
    return [detokenizer.push(tokens[piece]) for piece in pieces] + [detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 299), max_size=30), data=st.data())
def test_any_tokens_in_any_groups_give_the_full_decode(tokens: list[int], data: st.DataObject) -> None:
    full = tokenizer().decode(tokens)
    assert "".join(detokenize(tokens, cut(data, len(tokens)))) == full
    assert "".join(detokenize(tokens, [slice(i, i + 1) for i in range(len(tokens))])) == full


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aé你😀 \n\u200d\ufffdz"), max_size=20), data=st.data())
def test_valid_text_never_shows_a_broken_character(text: str, data: st.DataObject) -> None:
    tokens = tokenizer().encode(text)
    pieces = detokenize(tokens, cut(data, len(tokens)))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


STOPS = st.lists(st.text(st.sampled_from("ab你"), min_size=1, max_size=4), max_size=4)


def expected_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end of the text so far that is a stop, the longest such."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab你"), max_size=20), stops=STOPS, data=st.data())
def test_stop_strings_under_any_chunking(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner = StopStringScanner(stops)
    shown = ""
    kept, stop = expected_stop(text, stops)
    for piece in cut(data, len(text)):
        shown += scanner.push(text[piece])
        assert kept.startswith(shown)
    assert (shown + scanner.finish(), scanner.matched) == (kept, stop)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab"), max_size=12), stops=STOPS)
def test_no_more_is_held_back_than_a_stop_could_need(text: str, stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    shown = scanner.push(text)
    if scanner.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
