"""Rows under a lease in Redis or Valkey: those of the nodes, or those of the orchestrators.

A hash of name to JSON record, and a sorted set of name by the expiry of its lease, in milliseconds of the server's
clock. A lease is judged only while the server answers and takes writes: one that was away, stopped or set forward gives
everybody the time that it missed, and one that is full drops nobody. Rows and leases change in scripts only, so that
the fence (a newer incarnation is never overwritten or removed by an older one) and the change are one step. All writes
may be applied twice without harm, since the client retries.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, Generic

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ReadOnlyError, RedisError

from kvcache.registry import RowT, superseded
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation, NodeName

log = logging.getLogger(__name__)

TIMEOUT_S = 1.5
"""For connecting and for each answer: a server that is half a second away is slow, and not away. Nothing on a request's
path waits so long."""

# Who holds a name; a row that nobody could have written holds nothing.
_READ = """
local function read(held)
    local ok, row = pcall(cjson.decode, held or '')
    if ok and type(row) == 'table' and type(row.registered_at_unix_s) == 'number' then return row end
    return {registered_at_unix_s = -math.huge}
end
"""

AWAY_MS = 2000
"""Between two looks at the leases, of which watchers alone have two a second: the server was away."""
LOOK_MS = 500
"""Of each such time counts all the same: where nobody is left but somebody who looks now and then, leases must end."""

# KEYS: nodes, leases, when leases were last judged, and all sorted sets of leases. ARGV[1]: channel.
# Leaves `now` in milliseconds; `judge` drops the rows whose lease has run out, or answers the error of a server that
# takes no writes, so that no lease could have been refreshed.
_JUDGE = f"""
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function judge()
    local missed = now - tonumber(redis.call('GET', KEYS[3]) or now)
    local refused = redis.pcall('SET', KEYS[3], now)
    if refused.err then return refused end
    for i = 4, missed > {AWAY_MS} and #KEYS or 0 do
        for _, name in ipairs(redis.call('ZRANGE', KEYS[i], 0, -1)) do
            redis.call('ZINCRBY', KEYS[i], missed - {LOOK_MS}, name)
        end
    end
    local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
    for _, name in ipairs(lapsed) do
        redis.call('HDEL', KEYS[1], name)
        redis.call('ZREM', KEYS[2], name)
    end
    if #lapsed > 0 then redis.call('PUBLISH', ARGV[1], 'lapsed') end
    return nil
end
"""

# ARGV: channel, name, record, lease in ms, incarnation, registered_at. Answers the incarnation that holds the name.
_REGISTER = (
    _READ
    + _JUDGE
    + """
local refused = judge()
if refused then return refused end
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
_LIST = (
    _JUDGE
    + """
local refused = judge()
if refused and refused.err:find('READONLY') then return refused end
return redis.call('HGETALL', KEYS[1])
"""
)


class RedisRows(Generic[RowT]):
    """`keys`: as the scripts name them; `channel` is told who comes and goes."""

    def __init__(self, redis: Redis, keys: list[str], channel: str, row_type: type[RowT]) -> None:
        self._redis = redis
        self._keys = keys
        self._channel = channel
        self._row_type = row_type
        self._register = redis.register_script(_REGISTER)
        self._deregister = redis.register_script(_DEREGISTER)
        self._list = redis.register_script(_LIST)

    async def register(self, record: RowT, lease_s: float) -> None:
        holder = await answered(
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
        await answered(self._deregister(keys=self._keys, args=[self._channel, name, incarnation]))

    async def list(self) -> list[RowT]:
        rows = await answered(self._list(keys=self._keys, args=[self._channel]))
        records = [self._decode(name, row) for name, row in zip(rows[::2], rows[1::2], strict=True)]
        return sorted((record for record in records if record is not None), key=lambda record: record.name)

    def _decode(self, name: bytes, row: bytes) -> RowT | None:
        try:
            return msgspec.json.decode(row, type=self._row_type)
        except msgspec.MsgspecError as error:
            log.warning("the node registry's row of %r cannot be read and is left out: %s", name, error)
            return None


async def answered(answer: Awaitable[Any]) -> Any:
    """What Redis says. Raises Unavailable where it does not."""
    try:
        found = await answer
    except (RedisError, OSError) as error:
        honour_cancellation()
        raise Unavailable(f"the node registry in Redis does not answer: {error}") from error
    honour_cancellation()
    return found


def honour_cancellation() -> None:
    """redis-py 8.1 swallows a cancellation that comes while it opens a connection, and goes on; its caller must not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def connect(url: str) -> Redis:
    """At first use. A server that says that it is a replica now is dialled anew, since its address may be another's
    by then. ValueError where the URL cannot be read."""
    return Redis.from_url(
        url,
        socket_connect_timeout=TIMEOUT_S,
        socket_timeout=TIMEOUT_S,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 1),
        retry_on_error=[ReadOnlyError],
    )
