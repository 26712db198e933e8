"""The directory of blocks in Redis or Valkey.

Keys under the cluster's prefix, `<p>:dir:...`:

    row:<16 bytes of a hash>   string: the numbers of the lives that have the block, 4 bytes little-endian each
    of:<number>                set: the 16 bytes of every block that this life has, for its end
    names                      hash: node name -> JSON {incarnation, at, id}: who holds the name, under which number
    said                       hash: number -> which of its life's changes was the last
    lives                      hash: number -> JSON {incarnation, name}: the numbers that count
    leases                     sorted set: number by the end of its lease, in ms of the server's clock
    garbage                    set: numbers that count no more, whose rows are still to be cleared
    entries                    counter: how many (block, life) pairs there are

A life counts its changes, and says with each word which was the last that it was told of: a server that has lost some,
as a replica that took its master's place, knows nothing of it any more, so that it writes everything again. Numbers are
drawn at random: one that a flushed server gave again would still be another life's to whoever has read it.

A life writes under a number that is its own alone, so that nothing it wrote counts once the number is struck from
`lives`, at once, however many rows there are; they are cleared in batches afterwards. All changes are scripts, and may
be applied twice without harm, since the client retries. A string for each block and MGET were the fastest to read of
what was measured (2,600 prefixes of 256 blocks a second); scripts of 256 blocks the fastest to write.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from struct import iter_unpack
from typing import Any

import msgspec
from redis.exceptions import OutOfMemoryError, RedisError

from kvcache.directory import KEY_BYTES, LEASE_S, superseded, unknown
from kvcache.hashing import BlockHash
from kvcache.redis_rows import connect, honour_cancellation
from pronghorn.errors import ConfigurationError, Unavailable
from pronghorn.ids import Incarnation, NodeName

BYTES_PER_ENTRY = 200
"""Redis memory of one (block, life) pair, by measurement of a row (104) and a member of a set, rounded up."""
BATCH = 256
COLLECTED_AT_ONCE = 4 * BATCH
AT_ONCE = 2
"""Questions of one process, one of which may be its own changes. Each takes a connection that stays open, and a burst
of prompts would ask one each."""

# KEYS[1]: prefix. `strike` makes a number count no more.
_COMMON = """
local p = KEYS[1]
local function row_of(name)
    local ok, row = pcall(cjson.decode, redis.call('HGET', p .. 'names', name) or '')
    if ok and type(row) == 'table' then return row end
    return nil
end
local function now_ms()
    local t = redis.call('TIME')
    return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function strike(id)
    local ok, life = pcall(cjson.decode, redis.call('HGET', p .. 'lives', id) or '')
    if ok and type(life) == 'table' then
        local row = row_of(life.name)
        if row and tostring(row.id) == tostring(id) then redis.call('HDEL', p .. 'names', life.name) end
    end
    redis.call('HDEL', p .. 'lives', id)
    redis.call('HDEL', p .. 'said', id)
    redis.call('ZREM', p .. 'leases', id)
    redis.call('SADD', p .. 'garbage', id)
end
local function lapse()
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', now_ms())) do strike(id) end
end
local function forget(id, key)
    local packed = struct.pack('<I4', id)
    local held = redis.call('GET', p .. 'row:' .. key)
    if not held then return end
    local kept = {}
    for i = 1, #held, 4 do
        local one = held:sub(i, i + 3)
        if one ~= packed then kept[#kept + 1] = one end
    end
    if #kept == 0 then redis.call('DEL', p .. 'row:' .. key)
    else redis.call('SET', p .. 'row:' .. key, table.concat(kept)) end
end
"""

# ARGV: name, incarnation, the last change of this life that the server is known to have. Ends the script with {-1} or
# {-2, holder} unless this life holds the name and the server has that change. `says` is for a script that is a change.
_FENCED = (
    _COMMON
    + """
lapse()
local row = row_of(ARGV[1])
if not row then return {-1, ''} end
if row.incarnation ~= ARGV[2] then return {-2, row.incarnation} end
local said = tonumber(ARGV[3])
if tonumber(redis.call('HGET', p .. 'said', row.id) or 0) < said then return {-1, ''} end
local set = p .. 'of:' .. row.id
local function says() redis.call('HSET', p .. 'said', row.id, said + 1) end
"""
)

# ARGV: name, incarnation, registered_at, lease in ms, a number that nobody has had.
_OPEN = (
    _COMMON
    + """
lapse()
local row = row_of(ARGV[1])
if row and row.incarnation ~= ARGV[2] and row.at >= tonumber(ARGV[3]) then return {-2, row.incarnation} end
if row then strike(row.id) end
local id = tonumber(ARGV[5])
while redis.call('HEXISTS', p .. 'lives', id) == 1 or redis.call('SISMEMBER', p .. 'garbage', id) == 1 do
    id = (id + 1) % 4294967296
end
redis.call('HSET', p .. 'names', ARGV[1], cjson.encode({incarnation = ARGV[2], at = tonumber(ARGV[3]), id = id}))
redis.call('HSET', p .. 'lives', id, cjson.encode({incarnation = ARGV[2], name = ARGV[1]}))
redis.call('ZADD', p .. 'leases', now_ms() + ARGV[4], id)
return {id, ''}
"""
)

# ARGV: as above, bound on entries, keys.
_STORED = (
    _FENCED
    + """
local room = tonumber(ARGV[4]) - tonumber(redis.call('GET', p .. 'entries') or 0)
local packed = struct.pack('<I4', row.id)
local added, done = 0, 0
for i = 5, #ARGV do
    if redis.call('SISMEMBER', set, ARGV[i]) == 0 then
        if added >= room then break end
        redis.call('SADD', set, ARGV[i])
        redis.call('APPEND', p .. 'row:' .. ARGV[i], packed)
        added = added + 1
    end
    done = done + 1
end
if added > 0 then redis.call('INCRBY', p .. 'entries', added) end
says()
return {done, ''}
"""
)

# ARGV: as above, keys.
_REMOVED = (
    _FENCED
    + """
local gone = 0
for i = 4, #ARGV do
    if redis.call('SREM', set, ARGV[i]) == 1 then
        forget(row.id, ARGV[i])
        gone = gone + 1
    end
end
if gone > 0 then redis.call('DECRBY', p .. 'entries', gone) end
says()
return {gone, ''}
"""
)

# ARGV: as above, lease in ms.
_REFRESH = (
    _FENCED
    + """
redis.call('ZADD', p .. 'leases', now_ms() + ARGV[4], row.id)
return {redis.call('SCARD', p .. 'garbage'), ''}
"""
)

# ARGV: as above.
_LEAVE = (
    _FENCED
    + """
strike(row.id)
return {0, ''}
"""
)

# ARGV: how many rows at most. Answers how many were cleared.
_COLLECT = (
    _COMMON
    + """
local id = redis.call('SRANDMEMBER', p .. 'garbage')
if not id then return 0 end
local keys = redis.call('SPOP', p .. 'of:' .. id, ARGV[1])
for _, key in ipairs(keys) do forget(tonumber(id), key) end
if #keys > 0 then redis.call('DECRBY', p .. 'entries', #keys) end
if redis.call('SCARD', p .. 'of:' .. id) == 0 then redis.call('SREM', p .. 'garbage', id) end
return #keys
"""
)


class RedisDirectory:
    """Connects at first use. ConfigurationError where the URL cannot be read. `max_bytes` bounds what the rows of
    all nodes together take of Redis's memory."""

    def __init__(self, url: str, key_prefix: str, max_bytes: int) -> None:
        try:
            self._redis = connect(url)
        except ValueError as error:
            raise ConfigurationError(f"the Redis URL cannot be read: {error}", param="redis_url") from error
        self._prefix = f"{key_prefix}:dir:"
        self._max_entries = max_bytes // BYTES_PER_ENTRY
        self._lives: dict[int, Incarnation] = {}
        """As last read; a number never comes to stand for another life."""
        self._said: dict[Incarnation, int] = {}
        """Of each life that writes through this: the number of its last change that the server has."""
        self._at_once = asyncio.Semaphore(AT_ONCE)
        scripts = (_OPEN, _STORED, _REMOVED, _REFRESH, _LEAVE, _COLLECT)
        registered = (self._redis.register_script(script) for script in scripts)
        self._open, self._stored, self._removed, self._refresh, self._leave, self._collect = registered

    async def open(self, name: NodeName, incarnation: Incarnation, registered_at_unix_s: float) -> None:
        number = secrets.randbits(32)
        args = [name, incarnation, repr(registered_at_unix_s), round(LEASE_S * 1000), number]
        await self._run(self._open, name, incarnation, args)
        self._said[incarnation] = 0

    async def stored(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> int:
        done = 0
        for start in range(0, len(hashes), BATCH):
            keys = [block_hash[:KEY_BYTES] for block_hash in hashes[start : start + BATCH]]
            count = await self._change(self._stored, name, incarnation, self._max_entries, *keys)
            done += count
            if count < len(keys):
                break
        return done

    async def removed(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        for start in range(0, len(hashes), BATCH):
            keys = [block_hash[:KEY_BYTES] for block_hash in hashes[start : start + BATCH]]
            await self._change(self._removed, name, incarnation, *keys)

    async def refresh(self, name: NodeName, incarnation: Incarnation) -> None:
        try:
            garbage = await self._fenced(self._refresh, name, incarnation, round(LEASE_S * 1000))
        except Unavailable as error:
            if isinstance(error.__cause__, OutOfMemoryError):
                await self._clear()  # it may be what the server is full of
            raise
        if garbage:
            await self._clear()

    async def _clear(self) -> None:
        cleared = 0
        while cleared < COLLECTED_AT_ONCE:
            count = await self._ask(lambda: self._collect(keys=[self._prefix], args=[BATCH]))
            cleared += count
            if count == 0:
                break

    async def leave(self, name: NodeName, incarnation: Incarnation) -> None:
        await self._ask(lambda: self._leave(keys=[self._prefix], args=[name, incarnation, 0]))
        self._said.pop(incarnation, None)

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        depth: dict[int, int] = {}
        for start in range(0, len(hashes), BATCH):
            keys = [self._prefix.encode() + b"row:" + h[:KEY_BYTES] for h in hashes[start : start + BATCH]]
            if not _follow(depth, start, await self._ask(partial(self._redis.mget, keys))):
                break
        if not depth.keys() <= self._lives.keys():
            await self._read_lives()
        return {self._lives[number]: count for number, count in depth.items() if number in self._lives}

    async def rows(self) -> AsyncIterator[tuple[Incarnation, list[bytes]]]:
        await self._read_lives()
        for number, incarnation in list(self._lives.items()):
            cursor = -1
            while cursor:
                scan = partial(self._redis.sscan, f"{self._prefix}of:{number}", max(0, cursor), count=BATCH)
                cursor, keys = await self._ask(scan)
                if keys:
                    yield incarnation, list(keys)

    async def entries(self) -> int:
        """How many (block, life) pairs it has, those of lives that count no more and are yet to be cleared included."""
        return int(await self._ask(lambda: self._redis.get(f"{self._prefix}entries")) or 0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read_lives(self) -> None:
        found = await self._ask(lambda: self._redis.hgetall(f"{self._prefix}lives"))
        lives = {int(number): msgspec.json.decode(life) for number, life in found.items()}
        self._lives = {number: Incarnation(life["incarnation"]) for number, life in lives.items()}

    async def _change(self, script: Any, name: NodeName, incarnation: Incarnation, *args: object) -> int:
        count = await self._fenced(script, name, incarnation, *args)
        self._said[incarnation] = self._said.get(incarnation, 0) + 1
        return count

    async def _fenced(self, script: Any, name: NodeName, incarnation: Incarnation, *args: object) -> int:
        said = self._said.get(incarnation, 0)
        return await self._run(script, name, incarnation, [name, incarnation, said, *args])

    async def _run(self, script: Any, name: NodeName, incarnation: Incarnation, args: list[Any]) -> int:
        count, holder = await self._ask(lambda: script(keys=[self._prefix], args=args))
        if count == -1:
            raise unknown(name, incarnation)
        if count == -2:
            raise superseded(name, incarnation, holder.decode())
        return int(count)

    async def _ask(self, question: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with self._at_once:
                found = await question()
        except (RedisError, OSError) as error:
            honour_cancellation()
            raise Unavailable(f"the directory of blocks in Redis does not answer: {error}") from error
        honour_cancellation()
        return found


def _follow(depth: dict[int, int], start: int, rows: Sequence[bytes | None]) -> bool:
    """Lead each number that has all blocks up to `start` on through `rows`; whether any has them all."""
    end = start
    for row in rows:
        numbers = set() if row is None else {number for (number,) in iter_unpack("<I", row[: len(row) // 4 * 4])}
        leading = numbers if end == 0 else {number for number in numbers if depth.get(number) == end}
        if not leading:
            return False
        end += 1
        for number in sorted(leading):
            depth[number] = end
    return True


def open_directory(url: str, key_prefix: str, max_bytes: int) -> RedisDirectory | None:
    """None where no memory is given to it. ConfigurationError as the constructor."""
    return RedisDirectory(url, key_prefix, max_bytes) if max_bytes else None
