"""What a prompt's blocks are called: their hashes, as the nodes compute them, and the keys that an index has them by.

Knows the cluster's seed, the model and the layout that the nodes registered with; not requests nor where blocks lie.
Pure; the seed stays in here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.hashing import BlockHash, BlockHasher, HashAlgo, index_keys, pack_tokens
from kvcache.layout import ITEM_BYTES

DEFAULT_KV_BYTES_PER_TOKEN = 65_536.0
"""Until a layout is known."""


@dataclass(frozen=True)
class PromptBlocks:
    """The full blocks of one prompt that could be reused, in order."""

    hashes: list[BlockHash]
    keys: bytes
    """`index_keys` of the hashes."""
    block_tokens: int


class PromptKeys:
    def __init__(self, algo: HashAlgo, seed: bytes | None, model: str) -> None:
        """Without a seed nothing can be named, and every prompt has no blocks."""
        self._algo: HashAlgo = algo
        self._seed = seed
        self._model = model
        self._layout: dict[str, str] = {}
        self._hasher: BlockHasher | None = None
        self.kv_bytes_per_token = DEFAULT_KV_BYTES_PER_TOKEN

    def learn(self, layout: Mapping[str, str]) -> None:
        """A node registered with that layout. Nodes of one model agree on it, or refuse each other."""
        if self._seed is None or "block_tokens" not in layout or self._layout == layout:
            return
        self._layout = dict(layout)
        self._hasher = BlockHasher(self._algo, self._seed, self._model, None, self._layout)
        self.kv_bytes_per_token = _bytes_per_token(self._layout)

    def blocks(self, tokens: NDArray[np.int64], salt: str | None) -> PromptBlocks:
        """A prompt's last token is never reusable, so that a block that ends with it is left out."""
        hasher = self._hasher
        if hasher is None:
            return PromptBlocks([], b"", 1)
        full = (len(tokens) - 1) // hasher.block_tokens
        hashes = hasher.chain(pack_tokens(tokens[: full * hasher.block_tokens]), hasher.root(salt))
        return PromptBlocks(hashes, index_keys(hashes), hasher.block_tokens)

    def name(self, block_hash: BlockHash) -> str:
        """As a hint names it."""
        assert self._hasher is not None, "there are no blocks to name"
        return self._hasher.short(block_hash).hex()


def _bytes_per_token(layout: Mapping[str, str]) -> float:
    try:
        numbers = [int(layout[name]) for name in ("num_layers", "num_kv_heads", "head_dim")]
        return float(2 * numbers[0] * numbers[1] * numbers[2] * ITEM_BYTES[layout["dtype"]])
    except (KeyError, ValueError):  # a layout of another kind, whose blocks can be named all the same
        return DEFAULT_KV_BYTES_PER_TOKEN
