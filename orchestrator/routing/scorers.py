"""Marks for one way to serve a request, each in [0, 1], 1 being best.

Pure and small: numbers in, a number out. `kv_aware` decides by predicted time and shows these beside it; the seconds
that they are made of are `break_even.py`'s.
"""

from collections.abc import Mapping

TIER_WORTH: Mapping[str, float] = {"device": 1.0, "host": 0.8, "disk": 0.4}
"""What a block in that tier is worth, beside one that need not be moved."""


def overlap(held_tokens: int, prompt_tokens: int, tier: str = "device") -> float:
    """The share of the prompt that need not be computed."""
    return TIER_WORTH[tier] * min(1.0, held_tokens / max(1, prompt_tokens))


def queue(queued_s: float, scale_s: float = 1.0) -> float:
    """Halves with the first `scale_s` of prompts before this one."""
    return scale_s / (scale_s + queued_s)


def kv_use(free_blocks: int, total_blocks: int) -> float:
    """The share of the pool that could be taken; 1 where nothing is known of it."""
    return 1.0 if total_blocks == 0 else min(1.0, free_blocks / total_blocks)


def transfer(transfer_s: float, scale_s: float = 0.1) -> float:
    return scale_s / (scale_s + transfer_s)


def affinity(same: bool) -> float:
    return 1.0 if same else 0.0
