"""The node registry in Redis or Valkey: what every process of a cluster shares.

Keys under the cluster's prefix: `nodes` and `leases`, the rows of the nodes (`redis_rows.py`); `orchestrators` and
`orchestrator-leases`, those of the orchestrators; `seed`; and the channel `membership`, on which nodes come and go.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from kvcache.hashing import parse_seed
from kvcache.redis_rows import RedisRows, answered, honour_cancellation
from kvcache.registry import SEED_GRACE_S, NodeRecord, OrchestratorRecord
from pronghorn.errors import ConfigurationError, Unavailable

log = logging.getLogger(__name__)

TIMEOUT_S = 0.5
"""For connecting and for each answer. Short: nothing on a request's path may wait for Redis."""
SEED_POLL_S = 0.1
LAPSE_PERIOD_S = 0.5
"""How often a watcher looks for leases that have run out, since nobody else may."""


class RedisRegistry(RedisRows[NodeRecord]):
    """Connects at first use, on the event loop that uses it. ConfigurationError where the URL cannot be read."""

    def __init__(
        self,
        url: str,
        key_prefix: str,
        *,
        new_seed: Callable[[], bytes] = lambda: secrets.token_bytes(32),
        seed: bytes | None = None,
        seed_grace_s: float = 0.0,
    ) -> None:
        """`seed` is the one that was configured, where one was. `seed_grace_s`: how long a seed that is not there is
        waited for before one is made, since those who know it write it again after a flush (`SEED_PERIOD_S`)."""
        try:
            redis = Redis.from_url(
                url,
                socket_connect_timeout=TIMEOUT_S,
                socket_timeout=TIMEOUT_S,
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
            )
        except ValueError as error:
            raise ConfigurationError(f"the Redis URL cannot be read: {error}", param="redis_url") from error
        super().__init__(redis, [f"{key_prefix}:nodes", f"{key_prefix}:leases"], f"{key_prefix}:membership", NodeRecord)
        theirs = [f"{key_prefix}:orchestrators", f"{key_prefix}:orchestrator-leases"]
        self.orchestrators = RedisRows(redis, theirs, f"{key_prefix}:orchestrator-membership", OrchestratorRecord)
        self._new_seed = new_seed
        self._configured_seed = seed
        self._seed_grace_s = seed_grace_s
        self._seed_key = f"{key_prefix}:seed"

    async def changes(self) -> AsyncIterator[None]:
        told = False
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    while True:
                        honour_cancellation()
                        if await self._changed(channel):
                            told = False
                            yield
            except (RedisError, OSError, Unavailable) as error:
                honour_cancellation()
                if not told:
                    log.warning("the node registry does not answer; its changes are unseen until it does: %s", error)
                    told = True
                await asyncio.sleep(LAPSE_PERIOD_S)

    async def cluster_seed(self) -> bytes:
        for _ in range(round(self._seed_grace_s / SEED_POLL_S)):
            if await answered(self._redis.get(self._seed_key)) is not None:
                break
            await asyncio.sleep(SEED_POLL_S)
        await answered(self._redis.set(self._seed_key, self._configured_seed or self._new_seed(), nx=True))
        seed: bytes | None = await answered(self._redis.get(self._seed_key))
        if seed is None or len(seed) != 32:
            raise ConfigurationError(f"the key {self._seed_key} in Redis does not hold a seed of 32 bytes")
        if self._configured_seed not in (None, seed):
            raise ConfigurationError(
                "kv_cache_hash_seed is not the seed that this cluster's other processes use", param="kv_cache_hash_seed"
            )
        return seed

    async def keep_seed(self, seed: bytes) -> None:
        await answered(self._redis.set(self._seed_key, seed, nx=True))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _changed(self, channel: PubSub) -> bool:
        """Waits one period at most. Several messages that are here already are one change.

        The server's word that the subscription stands is a message too: it is the first wake-up, and the one after an
        outage, which the client rides out by subscribing again unseen.
        """
        message = await channel.get_message(timeout=LAPSE_PERIOD_S)
        while message is not None and await channel.get_message(timeout=0) is not None:
            pass
        if message is None:
            await self.list()  # drops lapsed rows, and says so on the channel
        return message is not None


def open_registry(url: str, key_prefix: str, hash_seed: str | None) -> RedisRegistry:
    """For a process of a cluster. `hash_seed` is the configured one, 64 hex digits. ConfigurationError where that or
    the URL cannot be read."""
    try:
        seed = None if hash_seed is None else parse_seed(hash_seed)
    except ValueError as error:
        raise ConfigurationError(f"kv_cache_hash_seed: {error}", param="kv_cache_hash_seed") from None
    return RedisRegistry(url, key_prefix, seed=seed, seed_grace_s=SEED_GRACE_S)
