"""The node registry in Redis or Valkey: what every process of a cluster shares.

Keys under the cluster's prefix: `nodes` and `leases`, the rows of the nodes (`redis_rows.py`); `orchestrators` and
`orchestrator-leases`, those of the orchestrators; `judged`, when leases were last looked at; `seed`; and the channel
`membership`, on which nodes come and go.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable

from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from kvcache.hashing import parse_seed
from kvcache.redis_rows import RedisRows, answered, connect, honour_cancellation
from kvcache.registry import SEED_GRACE_S, NodeRecord, OrchestratorRecord
from pronghorn.errors import ConfigurationError, Unavailable
from pronghorn.ids import Incarnation, NodeName

log = logging.getLogger(__name__)

SEED_POLL_S = 0.1
SEED_WAIT_S = 30.0
"""How long a seed is waited for that somebody must know. Rows whose processes are gone end long before."""
LAPSE_PERIOD_S = 0.5
"""How often a watcher looks for leases that have run out, since nobody else may."""


# KEYS: the seed, and hashes with a row for each process that knows it. ARGV: a seed for a cluster that has none.
_MAKE_SEED = """
local seed = redis.call('GET', KEYS[1])
if seed then return seed end
for i = 2, #KEYS do if redis.call('EXISTS', KEYS[i]) == 1 then return false end end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""


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
        waited for before one is made, since those who know it write it again after a flush (`SEED_PERIOD_S`); who waits
        makes none while any process that must know it is registered."""
        try:
            redis = connect(url)
        except ValueError as error:
            raise ConfigurationError(f"the Redis URL cannot be read: {error}", param="redis_url") from error
        leases = [f"{key_prefix}:leases", f"{key_prefix}:orchestrator-leases"]
        judged = [f"{key_prefix}:judged", *leases]
        ours = [f"{key_prefix}:nodes", leases[0], *judged]
        super().__init__(redis, ours, f"{key_prefix}:membership", NodeRecord)
        theirs = [f"{key_prefix}:orchestrators", leases[1], *judged]
        self.orchestrators = RedisRows(redis, theirs, f"{key_prefix}:orchestrator-membership", OrchestratorRecord)
        self._new_seed = new_seed
        self._configured_seed = seed
        self._seed_grace_s = seed_grace_s
        self._seed_key = f"{key_prefix}:seed"
        self._make_seed = redis.register_script(_MAKE_SEED)
        self._witnesses = [ours[0], theirs[0]] if seed_grace_s and seed is None else []

    async def changes(self) -> AsyncIterator[None]:
        told = False
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    known: dict[NodeName, Incarnation] | None = None
                    while True:
                        honour_cancellation()
                        if await self._told(channel):
                            told, known = False, None
                            yield
                            continue
                        now = {row.name: row.incarnation for row in await self.list()}  # which drops lapsed rows
                        before, known = known, now
                        if before not in (None, known):
                            break  # the channel is that of a server which another has replaced
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
        made = self._configured_seed or self._new_seed()
        give_up_s = asyncio.get_running_loop().time() + SEED_WAIT_S
        while (seed := await answered(self._make_seed(keys=[self._seed_key, *self._witnesses], args=[made]))) is None:
            if asyncio.get_running_loop().time() > give_up_s:
                raise Unavailable("processes of this cluster are registered, and none of them says its hash seed")
            await asyncio.sleep(SEED_POLL_S)
            for rows in (self, self.orchestrators):
                await rows.list()  # drops those who will never say it
        if len(seed) != 32:
            raise ConfigurationError(f"the key {self._seed_key} in Redis does not hold a seed of 32 bytes")
        if self._configured_seed not in (None, seed):
            raise ConfigurationError(
                "kv_cache_hash_seed is not the seed that this cluster's other processes use", param="kv_cache_hash_seed"
            )
        return bytes(seed)

    async def keep_seed(self, seed: bytes) -> None:
        await answered(self._redis.set(self._seed_key, seed, nx=True))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _told(self, channel: PubSub) -> bool:
        """Waits one period at most. Several messages that are here already are one change.

        The server's word that the subscription stands is a message too: it is the first wake-up, and the one after an
        outage, which the client rides out by subscribing again unseen.
        """
        message = await channel.get_message(timeout=LAPSE_PERIOD_S)
        while message is not None and await channel.get_message(timeout=0) is not None:
            pass
        return message is not None


def open_registry(url: str, key_prefix: str, hash_seed: str | None) -> RedisRegistry:
    """For a process of a cluster. `hash_seed` is the configured one, 64 hex digits. ConfigurationError where that or
    the URL cannot be read."""
    try:
        seed = None if hash_seed is None else parse_seed(hash_seed)
    except ValueError as error:
        raise ConfigurationError(f"kv_cache_hash_seed: {error}", param="kv_cache_hash_seed") from None
    return RedisRegistry(url, key_prefix, seed=seed, seed_grace_s=SEED_GRACE_S)
