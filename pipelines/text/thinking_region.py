"""Whether a sequence is thinking: between a model's begin and end markers, told by token ids alone.

Knows ids; neither text nor what is done about it. The answer is a pure function of the tokens so far, prompt included
(a template may open the region), so that it is the same after a preemption, on another node, and for every choice.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class ThinkingMarkers(msgspec.Struct, frozen=True):
    """Each one id where the vocabulary has it whole, else the ids that it is written with; never empty."""

    begin: list[int]
    end: list[int]


def is_thinking(tokens: NDArray[np.int64], markers: ThinkingMarkers) -> bool:
    """Of what follows `tokens`, int64 [n]: whether the last marker in them is a begin."""
    begun = _last(tokens, markers.begin)
    if begun is None:
        return False
    ended = _last(tokens, markers.end)
    return ended is None or ended < begun


def _last(tokens: NDArray[np.int64], marker: Sequence[int]) -> int | None:
    """Where `marker` starts the last time that it is there in whole."""
    starts = len(tokens) - len(marker) + 1
    if starts <= 0:
        return None
    found = tokens[:starts] == marker[0]
    for offset, token in enumerate(marker[1:], 1):
        found &= tokens[offset : offset + starts] == token
    places = np.flatnonzero(found)
    return int(places[-1]) if len(places) else None
