"""Sequences of padding, which make the batches of all replicas equally long where a device replays captured graphs.

Only batches of decoding sequences are padded, and only between replicas. A dummy is one token that was computed, one
that is to be: `generated_length` is 1. It owns blocks of its replica's pool; its tokens mean nothing and are reported
to nobody. Knows pools and batches; not requests. Invariant: the dummies of a batch are released when the batch after
it is made, or found to be empty, so that at most two batches' dummies are held, and none at rest.
"""

from collections.abc import Sequence

import numpy as np

from kvcache.block import BlockId
from kvcache.prefix_cache import PrefixCache
from pipelines.types.batch import BatchType, TextGenerationInputs
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import RequestID

Batch = TextGenerationInputs[TextContext]

DUMMY_TOKENS = 2


class Padding:
    def __init__(self, caches: Sequence[PrefixCache], root: bytes, *, enabled: bool) -> None:
        """`root` is what the dummies' tables are claimed with; nothing of theirs is ever published."""
        self._caches = caches
        self._root = root
        self._enabled = enabled and len(caches) > 1
        self._held: dict[RequestID, PrefixCache] = {}
        self._released: list[RequestID] = []

    def pad(self, batch: Batch) -> Batch:
        """`batch`, with dummies where its replicas' parts differ in length; unpadded where a pool has no room to spare.
        The dummies of the last call are released."""
        before = list(self._held)
        if self._enabled and batch.batch_type is BatchType.TG:
            batch = self._padded(batch)
        self._release(before)
        return batch

    def release(self) -> None:
        """No batch follows the last one for now."""
        self._release(list(self._held))

    def table(self, owner: RequestID) -> list[BlockId]:
        return self._held[owner].table(owner)

    def holds(self, owner: object) -> bool:
        return owner in self._held

    def take_released(self) -> list[RequestID]:
        released, self._released = self._released, []
        return released

    def _padded(self, batch: Batch) -> Batch:
        longest = max(len(contexts) for contexts in batch.batches)
        missing = [longest - len(contexts) for contexts in batch.batches]
        for cache, count, contexts in zip(self._caches, missing, batch.batches, strict=True):
            # A block stays free for each sequence to grow into: nothing real gives way to padding.
            if count and count * blocks_of_a_dummy(cache) + len(contexts) > cache.stats().free:
                return batch
        filled = [
            [*contexts, *(self._dummy(cache) for _ in range(count))]
            for contexts, cache, count in zip(batch.batches, self._caches, missing, strict=True)
        ]
        padded = Batch(batches=filled)
        padded.batch_type = batch.batch_type
        return padded

    def _dummy(self, cache: PrefixCache) -> TextContext:
        context = padding_context()
        cache.claim(context.request_id, self._root)
        cache.reserve(context.request_id, DUMMY_TOKENS)
        self._held[context.request_id] = cache
        return context

    def _release(self, dummies: Sequence[RequestID]) -> None:
        for dummy in dummies:
            self._held.pop(dummy).release(dummy)
            self._released.append(dummy)


def padding_context() -> TextContext:
    """A fresh dummy: token 0, advanced once."""
    tokens = TokenBuffer(np.zeros(1, dtype=np.int64))
    context = TextContext(max_length=DUMMY_TOKENS + 1, tokens=tokens, _is_padding_ctx=True)
    context.tokens.advance_with_token(0)
    return context


def blocks_of_a_dummy(cache: PrefixCache) -> int:
    return -(-DUMMY_TOKENS // cache.block_tokens)
