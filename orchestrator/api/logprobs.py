"""Log probabilities as clients read them: entries of tokens, and the two shapes that OpenAI's endpoints give them.

Knows token ids, numbers and a way to a token's bytes; not how they were computed. What the sampler ruled out is told as
`RULED_OUT`, since JSON has no infinity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.types.log_probabilities import LogProbabilities

RULED_OUT = -9999.0
"""As OpenAI tells it."""

BytesOf = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float | None
    """None: nothing comes before it."""
    top: Sequence[tuple[int, float]]
    """Most likely first, the token itself always among them."""


def entries_of(log_probabilities: Iterable[LogProbabilities]) -> Iterator[TokenLogprob]:
    for each in log_probabilities:
        for token, logprob, top in zip(
            each.sampled_token_ids, each.token_log_probabilities, each.top_log_probabilities, strict=True
        ):
            best = sorted(top.items(), key=lambda entry: (-entry[1], entry[0]))
            yield TokenLogprob(token, _told(logprob), [(id, _told(value)) for id, value in best])


def _told(logprob: float) -> float:
    return max(logprob, RULED_OUT)


def text_of(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def chat_logprobs(entries: Sequence[TokenLogprob], top: int, bytes_of: BytesOf) -> dict[str, Any]:
    """`choices[].logprobs` of chat: `top` alternatives each."""

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        data = bytes_of(token)
        return {"token": text_of(data), "logprob": logprob, "bytes": list(data)}

    content = [
        described(entry.token, entry.logprob) | {"top_logprobs": [described(*each) for each in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob], top: int, bytes_of: BytesOf, offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of completions: `top` alternatives each and the token itself; tokens of the same text share
    the place of the likelier one. `offset` is where the first token's text starts; so does what follows, returned."""
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        text = text_of(bytes_of(entry.token))
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        if entry.logprob is None:
            tops.append(None)
            continue
        shown = [*entry.top[:top], (entry.token, entry.logprob)]
        named: dict[str, float] = {}
        for token, logprob in shown:
            named.setdefault(text_of(bytes_of(token)), logprob)
        tops.append(named)
    logprobs = [entry.logprob for entry in entries]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset
