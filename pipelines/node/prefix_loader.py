"""Gets the beginning of a prompt from elsewhere before the engine computes it, where that is cheaper.

Knows contexts, hashes and the connector; not whose request it is. In order: what the node has itself is left alone;
where the same block is being brought already, that is waited for; the connector says what could be had; the engine
gives blocks for it; what has landed is published. All within a share of the request's time; whatever goes wrong, the
engine computes the prompt as if nothing had been tried.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from kvcache.connector import KVConnector, Landed, without
from kvcache.contents import CacheContents
from kvcache.hashing import BlockHash, BlockHasher, pack_tokens
from kvcache.memory import BlockMemory
from pipelines.node.engine_holds import EngineHolds
from pipelines.types.text_context import TextContext
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.deadline import Deadline
from pronghorn.errors import EngineDied, Overloaded, Unavailable

log = logging.getLogger(__name__)

SHARE: Final = 0.5
"""Of what is left of a request's time; the rest is for computing what did not come."""
MARGIN: Final = 0.9
"""Of that share, so that what has landed when it is over still counts."""


class PrefixLoader:
    def __init__(
        self,
        connector: KVConnector,
        hasher: BlockHasher,
        contents: CacheContents,
        holds: EngineHolds,
        memory: BlockMemory,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._connector = connector
        self._hasher = hasher
        self._contents = contents
        self._holds = holds
        self._memory = memory
        self._clock = clock
        self._counters = counters
        self._bringing: dict[BlockHash, asyncio.Event] = {}
        """By the first block that is being brought."""

    def may_help(self, context: TextContext) -> bool:
        """Whether `brought` could bring anything. Where not, the engine can have the prompt at once."""
        if context.awaits_prompt_log_probabilities or len(context.tokens) <= self._hasher.block_tokens:
            return False
        return self._connector.may_have(context.external_block_metadata)

    @asynccontextmanager
    async def brought(self, context: TextContext, deadline: Deadline) -> AsyncIterator[Mapping[str, int]]:
        """What could be brought of the prompt's prefix is in the pool, and stays there until the context is left: by
        then the engine has been given the prompt. Notes in `context` how many tokens came. Raises nothing of its own.
        Gives the bytes that came, by source.
        """
        async with AsyncExitStack() as stack:
            now_s = self._clock.now_s()
            landed = Landed(0)
            try:
                async with asyncio.timeout(deadline.remaining_s(now_s) * SHARE):
                    landed = await self._bring(stack, context, now_s + deadline.remaining_s(now_s) * SHARE)
            except TimeoutError:
                self._counters.count("prefix_not_brought", "timeout")
            except (Unavailable, Overloaded, EngineDied) as error:
                self._counters.count("prefix_not_brought", error.code)
            yield landed.size_bytes

    async def fetched(
        self, context: TextContext, start: int, block_ids: Sequence[int], deadline: Deadline, failed: Container[str]
    ) -> Landed:
        """Write the prompt's blocks from position `start` on, those that are full, into `block_ids`, which are the
        caller's; what has come. `failed` are nodes whose word in a hint counts for nothing. Nothing
        is written after its end. Raises nothing but cancellation."""
        chain = self._chain(context)
        wanted = self._reusable(context, chain)[: start + len(block_ids)]
        share_s = deadline.remaining_s(self._clock.now_s()) * SHARE
        try:
            async with asyncio.timeout(share_s):
                hint = without(context.external_block_metadata, failed)
                located = await self._connector.lookup(chain, start, hint)
                count = min(located.blocks, len(wanted)) - start
                destinations = [self._memory.block(block) for block in block_ids[: max(0, count)]]
                if not destinations:
                    return Landed(0)
                hashes = wanted[: start + len(destinations)]
                return await self._connector.load(located, hashes, start, destinations, MARGIN * share_s)
        except TimeoutError:
            self._counters.count("prefix_not_brought", "timeout")
            return Landed(0)

    def _chain(self, context: TextContext) -> list[BlockHash]:
        return self._hasher.chain(pack_tokens(context.tokens.all), self._hasher.root(context.cache_salt))

    def _reusable(self, context: TextContext, chain: list[BlockHash]) -> list[BlockHash]:
        """The last token is always computed."""
        return chain[: (len(context.tokens) - 1) // self._hasher.block_tokens]

    async def _bring(self, stack: AsyncExitStack, context: TextContext, until_s: float) -> Landed:
        chain = self._chain(context)
        wanted = self._reusable(context, chain)
        self._connector.touch(wanted)
        while True:
            known = self._contents.leading(wanted)
            if known == len(wanted):
                return Landed(0)
            under_way = self._bringing.get(wanted[known])
            if under_way is None:
                break
            await under_way.wait()
        done = self._bringing[wanted[known]] = asyncio.Event()
        try:
            landed = await self._load(stack, context, chain, wanted, known, until_s)
            context.cached_prefix_external_length = landed.blocks * self._hasher.block_tokens
            return landed
        finally:
            del self._bringing[wanted[known]]
            done.set()

    async def _load(
        self,
        stack: AsyncExitStack,
        context: TextContext,
        chain: Sequence[BlockHash],
        wanted: Sequence[BlockHash],
        known: int,
        until_s: float,
    ) -> Landed:
        located = await self._connector.lookup(chain, known, context.external_block_metadata)
        count = min(located.blocks, len(wanted))
        if count <= known:
            return Landed(0)
        imported = await stack.enter_async_context(self._holds.importing(wanted[:count]))
        if imported is None:
            self._counters.count("prefix_not_brought", "no_room")
            return Landed(0)
        if imported.found == count:
            return Landed(0)
        destinations = [self._memory.block(block) for block in imported.blocks[imported.found :]]
        budget_s = MARGIN * (until_s - self._clock.now_s())
        landed = await self._connector.load(located, wanted[:count], imported.found, destinations, budget_s)
        if landed.blocks:
            imported.publish(imported.found + landed.blocks)
        return landed
