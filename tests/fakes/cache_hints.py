"""Hints as a router or a client would send them, for prompts of the canary."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache.hashing import BlockHash, BlockHasher, pack_tokens
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import canary_layout

HASHER = BlockHasher("sha256", SEED, "canary", None, canary_layout(4))


def chain(tokens: Sequence[int], salt: str | None = None) -> list[BlockHash]:
    return HASHER.chain(pack_tokens(np.array(tokens)), HASHER.root(salt))


def hint(tokens: Sequence[int], salt: str | None = None, **blocks: int) -> dict[str, Any]:
    """`name=blocks` for each instance, underscores in the place of dashes."""
    hashes = chain(tokens, salt)
    return {
        "version": 1,
        "instances": [
            {"name": name.replace("_", "-"), "blocks": count, "last_hash": hashes[count - 1].hex()}
            for name, count in blocks.items()
        ],
    }
