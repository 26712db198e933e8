"""Requests of a load: read from a trace, or made up in its likeness.

A trace is JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for each
`TRACE_BLOCK_TOKENS` of the prompt, equal where the prefix up to there is equal. What is made up are conversations that
go on, behind a few system prompts of which some are far more common than others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from pronghorn.errors import ConfigurationError

TRACE_BLOCK_TOKENS = 512
LONGEST_PROMPT_TOKENS = 16_384
OPEN_CONVERSATIONS = 20_000
SYSTEM_PROMPTS = 200


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    priority: int = 0
    share: str = ""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> Iterator[TraceRequest]:
    """Raises ConfigurationError, naming the line, for what is no trace."""
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                said = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigurationError(f"{path}:{number}: {error}", param="trace") from error
            yield TraceRequest(
                said.timestamp / 1000.0, said.input_length, max(1, said.output_length), tuple(said.hash_ids)
            )


@dataclass(slots=True)
class _Conversation:
    tokens: int
    hash_ids: tuple[int, ...]


def make_up(random: Random, count: int, requests_per_s: float) -> Iterator[TraceRequest]:
    """Arrivals without memory at that rate."""
    at_s = 0.0
    next_id = SYSTEM_PROMPTS * 8
    conversations: list[_Conversation] = []
    for _ in range(count):
        at_s += random.expovariate(requests_per_s)
        going_on = bool(conversations) and random.random() < 0.6
        place = random.randrange(len(conversations)) if going_on else -1
        talk = conversations[place] if going_on else _begin(random)
        tokens = talk.tokens + int(random.lognormvariate(5.5, 1.0)) + 1
        new_ids = max(0, tokens // TRACE_BLOCK_TOKENS - len(talk.hash_ids))
        hash_ids = (*talk.hash_ids, *range(next_id, next_id + new_ids))
        next_id += new_ids
        output_tokens = 1 + min(2000, int(random.lognormvariate(4.8, 0.8)))
        yield TraceRequest(at_s, tokens, output_tokens, hash_ids)
        said = _Conversation(tokens + output_tokens, hash_ids)
        if said.tokens > LONGEST_PROMPT_TOKENS:
            said = _begin(random)
        if going_on:
            conversations[place] = said
        elif len(conversations) < OPEN_CONVERSATIONS:
            conversations.append(said)
        else:
            conversations[random.randrange(OPEN_CONVERSATIONS)] = said


def _begin(random: Random) -> _Conversation:
    """A conversation that has only its system prompt, the first ones being the most common."""
    which = min(SYSTEM_PROMPTS - 1, int(random.paretovariate(0.8)) - 1)
    blocks = 1 + which % 4
    return _Conversation(blocks * TRACE_BLOCK_TOKENS, tuple(range(which * 8, which * 8 + blocks)))
