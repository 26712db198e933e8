"""What a Redis server says of itself: for whoever looks after it. Writes nothing."""

from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pronghorn.errors import ConfigurationError, Unavailable

TIMEOUT_S = 5.0


class ServerFacts(NamedTuple):
    version: str
    """That of the Redis whose protocol it speaks."""
    eviction: str | None
    """`maxmemory-policy`; None where it does not tell, as some hosted ones do not."""
    time_s: float
    """Its clock, since the epoch."""


async def ask_server(url: str) -> ServerFacts:
    """Raises Unavailable where it does not answer, ConfigurationError where the URL cannot be read."""
    try:
        redis = Redis.from_url(url, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S)
    except ValueError:
        raise ConfigurationError("the Redis URL cannot be read", param="redis_url") from None
    try:
        info = await redis.info()
        seconds, microseconds = await redis.time()
    except (RedisError, OSError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from None
    finally:
        await redis.aclose()
    policy = info.get("maxmemory_policy")
    return ServerFacts(str(info["redis_version"]), policy and str(policy), seconds + microseconds / 1e6)
