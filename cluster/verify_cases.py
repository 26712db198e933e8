"""Which prompts prove that a P/D cluster computes what one process computes, and how two answers are judged. Pure.

Around every block border (one token before it, on it, one after it) for 1 to 6 blocks, with every number of blocks of
the prompt already in the decode node's cache: these are the places where a hand-over by position can be off by one.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

NEAR_TIE = 1e-4
"""Two best logits closer than this may change places between two correct float32 computations."""

Verdict = Literal["equal", "near tie", "different"]


@dataclass(frozen=True)
class ParityCase:
    blocks: int
    offset: int
    warm_blocks: int
    prompt: tuple[int, ...]

    @property
    def warm_prompt(self) -> tuple[int, ...] | None:
        """What has to be asked first, so that the decode node holds exactly `warm_blocks` blocks of the prompt."""
        if self.warm_blocks == 0:
            return None
        block_tokens = (len(self.prompt) - self.offset) // self.blocks
        return self.prompt[: self.warm_blocks * block_tokens + 1]

    def __str__(self) -> str:
        return f"{len(self.prompt)} tokens ({self.blocks} blocks {self.offset:+d}), {self.warm_blocks} warm"


def parity_cases(block_tokens: int, vocab_size: int, seed: int, quick: bool) -> Iterator[ParityCase]:
    """Every prompt is random and its own, so nothing is warm but what a case made warm."""
    rng = random.Random(seed)
    for blocks in (1, 2, 3) if quick else range(1, 7):
        for offset in (-1, 0, 1):
            for warm_blocks in {0, blocks - 1} if quick else range(blocks):
                length = blocks * block_tokens + offset
                prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
                yield ParityCase(blocks, offset, warm_blocks, prompt)


def judge(expected: Sequence[int], found: Sequence[int], gaps: Sequence[float]) -> tuple[Verdict, int | None]:
    """How `found` compares, and where it first differs. `gaps[i]` is the distance of the two best logits at token i of
    the expected answer."""
    if list(expected) == list(found):
        return "equal", None
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:  # one is the other's beginning: nothing but a different end explains it
        return "different", min(len(expected), len(found))
    return ("near tie" if gaps[at] <= NEAR_TIE else "different"), at
