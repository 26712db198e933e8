"""What must hold before anything is started; each is refused in one line that says what to do."""

import asyncio
import socket

from cluster.config import MEBIBYTE, ClusterConfig
from cluster.config_problems import redacted
from kvcache.redis_registry import RedisRegistry
from pronghorn.errors import ConfigurationError, Unavailable

CONNECT_TIMEOUT_S = 5.0


def require_redis(url: str, key_prefix: str) -> None:
    """Raises ConfigurationError where no Redis server answers at `url`."""

    async def ask() -> None:
        registry = RedisRegistry(url, key_prefix)
        try:
            await registry.list()
        finally:
            await registry.close()

    try:
        asyncio.run(ask())
    except Unavailable as error:
        raise ConfigurationError(f"Redis cannot be reached at {redacted(url)}: {error.message}") from None


def require_ray(address: str) -> None:
    """Raises ConfigurationError where nobody listens at `address`: Ray itself would wait for minutes. "auto" is for Ray
    to resolve."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--address is {address!r}; write auto or host:port", param="address")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"no Ray cluster answers at {address}: {error}", param="address") from None


def require_memory(config: ClusterConfig, available_bytes: int | None) -> None:
    """Raises ConfigurationError where the nodes' KV pools together need more than there is."""
    pools = [(model.prefill + model.decode, model.kv_memory_bytes) for model in config.service.each]
    nodes = sum(count for count, _ in pools)
    asked = sum(count * size for count, size in pools)
    if config.address is None and available_bytes is not None and asked > available_bytes:
        raise ConfigurationError(
            f"the KV pools of {nodes} nodes ask for {asked // MEBIBYTE} MiB and {available_bytes // MEBIBYTE} MiB of "
            "memory are available; give less --kv-memory or fewer nodes",
            param="kv_memory",
        )
