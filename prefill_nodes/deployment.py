"""The prefill node as a Ray Serve replica: which concrete parts it is made of, and Serve's hooks on it.

Knows Ray for the replica's tag and its machine's address alone; `cluster/build.py` makes a deployment of the class.
Serve pickles the class by value, so it holds no state but its node, and its globals are only names that are imported
from here.
"""

import asyncio
import os
from functools import partial
from typing import Any, Final

import msgspec
import ray
from ray import serve

from kvcache.memory import BlockMemory
from kvcache.redis_directory import open_directory
from kvcache.redis_registry import open_registry
from kvcache.registry import NodeRegistry
from pipelines.node.config import parse_config
from pipelines.node.frame_memory import keep_frame_memory
from pipelines.node.peer_streams import streams_from_nodes
from pipelines.node.stream_client import IDLE_CHANNEL_S
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.process import ProcessEngine
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.node import PrefillNode
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError
from pronghorn.ids import NodeName
from pronghorn.sigterm import hear_sigterm
from pronghorn.wire import FETCH_METHOD

ENGINE: Final = "prefill_nodes.engine"


async def start_node(name: NodeName, config: PrefillNodeConfig, registry: NodeRegistry) -> PrefillNode:
    """A node that serves, its engine in a process of its own. On failure nothing is left running.

    Raises ConfigurationError, EngineDied, or Unavailable where the registry does not answer.
    """
    keep_frame_memory()
    clock, counters = SystemClock(), Counters()
    engine_config = config.node.engine
    seed = await registry.cluster_seed()
    directory = open_directory(config.node.redis_url, config.node.key_prefix, config.node.directory_bytes)
    memory = BlockMemory.create(engine_config.total_blocks, layout_of(engine_config).block_bytes)
    node = PrefillNode(
        name=name,
        config=config,
        hash_seed=seed,
        engine=ProcessEngine(ENGINE, engine_config, seed, memory, name=name),
        registry=registry,
        fetch=streams_from_nodes(FETCH_METHOD, config.node, clock, IDLE_CHANNEL_S, counters),
        directory=directory,
        clock=clock,
        counters=counters,
    )
    await node.start()
    try:
        await node.shell.serve_operations()
    except ConfigurationError:
        await node.shell.stop()
        raise
    return node


class PrefillNodeDeployment:
    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits the constructor
        """`config` is a PrefillNodeConfig as plain data. Raises ConfigurationError naming the field at fault."""
        self._node: PrefillNode | None = None
        parsed = parse_config(config, PrefillNodeConfig)
        self._registry = open_registry(parsed.node.redis_url, parsed.node.key_prefix, parsed.node.kv_cache_hash_seed)
        self._drain_timeout_s = parsed.node.drain_timeout_s
        replica = serve.get_replica_context()
        name = NodeName(f"{replica.deployment}-{replica.replica_tag}")  # the deployment's name begins with the role
        node = parsed.node.placed(ray.util.get_node_ip_address)
        self._node = await start_node(name, msgspec.structs.replace(parsed, node=node), self._registry)
        # Serve starts another replica in the place of one whose process has ended.
        self._node.shell.when_dismissed = partial(os._exit, 0)
        hear_sigterm(asyncio.get_running_loop(), partial(self._node.shell.dismiss, None))

    async def check_health(self) -> None:
        assert self._node is not None
        await self._node.shell.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        assert self._node is not None
        return self._node.shell.autoscaling_stats()

    async def __del__(self) -> None:
        """Serve's hook before a replica goes. It must wait itself: Serve does not count what runs over gRPC."""
        if self._node is not None:
            await self._node.drain(self._drain_timeout_s)
            await self._registry.close()
