import math

from orchestrator.api.logprobs import RULED_OUT, TokenLogprob, chat_logprobs, completion_logprobs, entries_of
from pipelines.types.log_probabilities import LogProbabilities

NAMES = {1: b"a", 2: b"bc", 3: b"\xe2", 4: b"a"}.__getitem__
FOUND = LogProbabilities([-2.0, -math.inf], [{1: -0.5, 2: -2.0}, {2: -0.1, 3: -math.inf}], [2, 3])


def test_entries_are_sorted_and_infinity_is_told_as_a_number() -> None:
    assert list(entries_of([FOUND])) == [
        TokenLogprob(2, -2.0, [(1, -0.5), (2, -2.0)]),
        TokenLogprob(3, RULED_OUT, [(2, -0.1), (3, RULED_OUT)]),
    ]


def test_chat_tells_bytes_and_just_as_many_alternatives_as_were_asked() -> None:
    told = chat_logprobs(list(entries_of([FOUND])), 1, NAMES)
    assert told["content"][0] == {
        "token": "bc",
        "logprob": -2.0,
        "bytes": [98, 99],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert told["content"][1]["token"] == "\N{REPLACEMENT CHARACTER}" and told["content"][1]["bytes"] == [0xE2]
    assert chat_logprobs(list(entries_of([FOUND])), 0, NAMES)["content"][0]["top_logprobs"] == []


def test_completions_tell_offsets_and_the_token_itself_beside_the_alternatives() -> None:
    entries = [TokenLogprob(1, None, ()), *entries_of([FOUND])]
    told, end = completion_logprobs(entries, 1, NAMES, 10)
    assert told == {
        "tokens": ["a", "bc", "\N{REPLACEMENT CHARACTER}"],
        "token_logprobs": [None, -2.0, RULED_OUT],
        "top_logprobs": [None, {"a": -0.5, "bc": -2.0}, {"bc": -0.1, "\N{REPLACEMENT CHARACTER}": RULED_OUT}],
        "text_offset": [10, 11, 13],
    }
    assert end == 14


def test_of_tokens_with_one_text_the_likelier_is_told() -> None:
    told, _ = completion_logprobs([TokenLogprob(4, -3.0, [(1, -0.1), (4, -3.0)])], 2, NAMES, 0)
    assert told["top_logprobs"] == [{"a": -0.1}]
