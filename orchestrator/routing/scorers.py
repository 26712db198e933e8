"""Marks for one way to serve a request, each in [0, 1], 1 being best.

Pure and small: numbers in, a number out. `kv_aware` decides by predicted time and shows these beside it; the seconds
that they are made of are `break_even.py`'s.
"""


def overlap(prompt_tokens: int, *held: tuple[int, float]) -> float:
    """The share of the prompt that need not be computed. `held`: tokens in one tier, and what one of them is worth
    beside one that lies in the pool (`break_even.restored_worth`)."""
    return min(1.0, sum(tokens * worth for tokens, worth in held) / max(1, prompt_tokens))


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
