"""The node registry in Redis or Valkey: what every process of a cluster shares.

Keys under the cluster's prefix: `nodes`, a hash of name to JSON record; `leases`, a sorted set of name by the expiry
of its lease, in milliseconds of the server's clock; `seed`; and the channel `membership`. Rows and leases change in
scripts only, so that the fence (a newer incarnation is never overwritten or removed by an older one) and the change
are one step. All writes may be applied twice without harm, since the client retries.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from kvcache.registry import NodeRecord, superseded
from pronghorn.errors import ConfigurationError, Unavailable
from pronghorn.ids import Incarnation, NodeName

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 0.5
"""For connecting and for each answer. Short: nothing on a request's path may wait for Redis."""
LAPSE_PERIOD_S = 0.5
"""How often a watcher looks for leases that have run out, since nobody else may."""

# Who holds a name; a row that nobody could have written holds nothing.
_READ = """
local function read(held)
    local ok, row = pcall(cjson.decode, held or '')
    if ok and type(row) == 'table' and type(row.registered_at_unix_s) == 'number' then return row end
    return {registered_at_unix_s = -math.huge}
end
"""

# KEYS: nodes, leases. ARGV[1]: channel. Leaves `now` in milliseconds and drops the rows whose lease has run out.
_DROP_LAPSED = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
for _, name in ipairs(lapsed) do
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
end
if #lapsed > 0 then redis.call('PUBLISH', ARGV[1], 'lapsed') end
"""

# ARGV: channel, name, record, lease in ms, incarnation, registered_at. Answers the incarnation that holds the name.
_REGISTER = (
    _READ
    + _DROP_LAPSED
    + """
local row = read(redis.call('HGET', KEYS[1], ARGV[2]))
local new = row.incarnation ~= ARGV[5]
if new and row.registered_at_unix_s >= tonumber(ARGV[6]) then return row.incarnation end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[2])
if new then redis.call('PUBLISH', ARGV[1], 'joined') end
return ARGV[5]
"""
)

# ARGV: channel, name, incarnation.
_DEREGISTER = (
    _READ
    + """
if read(redis.call('HGET', KEYS[1], ARGV[2])).incarnation == ARGV[3] then
    redis.call('HDEL', KEYS[1], ARGV[2])
    redis.call('ZREM', KEYS[2], ARGV[2])
    redis.call('PUBLISH', ARGV[1], 'left')
end
"""
)

# ARGV: channel.
_LIST = _DROP_LAPSED + "return redis.call('HGETALL', KEYS[1])"


class RedisRegistry:
    """Connects at first use, on the event loop that uses it. ConfigurationError where the URL cannot be read."""

    def __init__(
        self,
        url: str,
        key_prefix: str,
        *,
        new_seed: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:
        try:
            self._redis = Redis.from_url(
                url,
                socket_connect_timeout=TIMEOUT_S,
                socket_timeout=TIMEOUT_S,
                retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
            )
        except ValueError as error:
            raise ConfigurationError(f"the Redis URL cannot be read: {error}", param="redis_url") from error
        self._new_seed = new_seed
        self._keys = [f"{key_prefix}:nodes", f"{key_prefix}:leases"]
        self._seed_key = f"{key_prefix}:seed"
        self._channel = f"{key_prefix}:membership"
        self._register = self._redis.register_script(_REGISTER)
        self._deregister = self._redis.register_script(_DEREGISTER)
        self._list = self._redis.register_script(_LIST)

    async def register(self, record: NodeRecord, lease_s: float) -> None:
        holder = await self._ask(
            self._register(
                keys=self._keys,
                args=[
                    self._channel,
                    record.name,
                    msgspec.json.encode(record),
                    round(lease_s * 1000),
                    record.incarnation,
                    repr(record.registered_at_unix_s),
                ],
            )
        )
        if holder.decode() != record.incarnation:
            raise superseded(record, holder.decode())

    async def deregister(self, name: NodeName, incarnation: Incarnation) -> None:
        await self._ask(self._deregister(keys=self._keys, args=[self._channel, name, incarnation]))

    async def list(self) -> list[NodeRecord]:
        rows = await self._ask(self._list(keys=self._keys, args=[self._channel]))
        records = [_decode(name, row) for name, row in zip(rows[::2], rows[1::2], strict=True)]
        return sorted((record for record in records if record is not None), key=lambda record: record.name)

    async def changes(self) -> AsyncIterator[None]:
        told = False
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    while True:
                        _honour_cancellation()
                        if await self._changed(channel):
                            told = False
                            yield
            except (RedisError, OSError, Unavailable) as error:
                _honour_cancellation()
                if not told:
                    log.warning("the node registry does not answer; its changes are unseen until it does: %s", error)
                    told = True
                await asyncio.sleep(LAPSE_PERIOD_S)

    async def cluster_seed(self) -> bytes:
        await self._ask(self._redis.set(self._seed_key, self._new_seed(), nx=True))
        seed: bytes | None = await self._ask(self._redis.get(self._seed_key))
        if seed is None or len(seed) != 32:
            raise ConfigurationError(f"the key {self._seed_key} in Redis does not hold a seed of 32 bytes")
        return seed

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

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            found = await answer
        except (RedisError, OSError) as error:
            _honour_cancellation()
            raise Unavailable(f"the node registry in Redis does not answer: {error}") from error
        _honour_cancellation()
        return found


def _honour_cancellation() -> None:
    """redis-py 8.1 swallows a cancellation that comes while it opens a connection, and goes on; its caller must not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _decode(name: bytes, row: bytes) -> NodeRecord | None:
    try:
        return msgspec.json.decode(row, type=NodeRecord)
    except msgspec.MsgspecError as error:
        log.warning("the node registry's row of %r cannot be read and is left out: %s", name, error)
        return None
