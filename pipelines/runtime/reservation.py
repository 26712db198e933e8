"""Getting a prompt its blocks: match what is cached, then reserve the rest, or leave no trace.

Knows prefix caches and a context's window. Must not know why the blocks are wanted.
"""

from collections.abc import Hashable, Sequence

from kvcache.block import BlockCopy
from kvcache.hashing import BlockHash, BlockHasher
from kvcache.prefix_cache import PrefixCache
from pipelines.types.text_context import TextContext


def reserve_prompt(
    cache: PrefixCache,
    hasher: BlockHasher,
    owner: Hashable,
    context: TextContext,
    chain: list[BlockHash],
    num_tokens: int,
    spare_blocks: int,
    others: Sequence[PrefixCache] = (),
) -> list[BlockCopy] | None:
    """Claim `owner`, attach its longest cached prefix, and reserve blocks for `num_tokens` tokens in all, with its
    hashes in `chain`.

    Leaves `spare_blocks` free. On success the window of `context` begins behind the cached prefix, whose length is
    noted in `cached_prefix_length` the first time. What `others` have of the prefix beyond what is here comes in
    copies, to be made at once. None where there is no room: nothing is held then.
    """
    needed_tokens = num_tokens + spare_blocks * cache.block_tokens
    reusable_blocks = (len(context.tokens) - 1) // cache.block_tokens
    if -(-needed_tokens // cache.block_tokens) - reusable_blocks > cache.stats().free:
        return None  # not even if all of it is cached: a prompt that waits is not hashed anew at each step
    cache.claim(owner, hasher.root(context.cache_salt), chain)
    if not context.awaits_prompt_log_probabilities:  # every row of such a prompt is to be computed
        cache.match(owner, context.tokens[:])
    if not cache.can_reserve(owner, needed_tokens):
        cache.release(owner)
        return None
    cache.reserve(owner, num_tokens)
    copies = cache.copy_from(owner, others) if others else []
    if cached_tokens := cache.cached_blocks(owner) * cache.block_tokens:
        context.tokens.skip_processing(cached_tokens)
    if context.cached_prefix_length is None:
        context.cached_prefix_length = cached_tokens
    return copies
