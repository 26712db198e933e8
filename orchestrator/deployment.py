"""The orchestrator as a Ray Serve ingress: Serve's hooks on what `assembly.py` puts together.

Knows Ray for the ingress decorator, the replica's tag and its machine's address alone; `cluster/build.py` makes a
deployment of the class.
Everything is made in the constructor, on the loop that will use it, and hangs on the replica: the routes close over it.
"""

import asyncio
import time
from typing import Any

import ray
from ray import serve

from kvcache.redis_registry import open_registry
from orchestrator.api.app import build_app
from orchestrator.assembly import ROLE, api_settings, identify, start_replica
from orchestrator.collector import settle
from orchestrator.config import parse_config
from orchestrator.measured import MeasuredGenerator
from orchestrator.presence import Presence
from orchestrator.replica import Replica
from pipelines.text.tokenizer import TextTokenizer
from pronghorn.clock import SystemClock
from pronghorn.errors import InternalError, Unavailable
from pronghorn.sigterm import hear_sigterm


@serve.ingress()
class OrchestratorDeployment:
    async def __init__(self, config: dict[str, Any], *nodes: object) -> None:  # type: ignore[misc]  # Serve awaits it
        """`config` is an OrchestratorConfig as plain data; `nodes` are bound only to belong to the application.

        Raises ConfigurationError naming the field or file at fault, Unavailable where the registry does not answer.
        """
        self._replica: Replica | None = None
        self._leaving = False
        parsed = parse_config(config)
        tokenizer = TextTokenizer.from_folder(parsed.model_path)
        self._registry = open_registry(parsed.redis_url, parsed.key_prefix, parsed.kv_cache_hash_seed)
        name = f"{ROLE}-{serve.get_replica_context().replica_tag}"
        identity = await identify(name, parsed, self._registry)
        self._replica = replica = await start_replica(identity, parsed, self._registry)
        self._presence = Presence(replica, identity, self._registry, parsed.lease_s)
        await self._presence.start(parsed.operations_host or ray.util.get_node_ip_address())
        measured = MeasuredGenerator(replica, self._presence.requests, SystemClock())
        settings = api_settings(parsed, int(time.time()))
        self._http = build_app(measured, replica, tokenizer, settings, self._presence.operations)
        settle()
        hear_sigterm(asyncio.get_running_loop(), self._leave)

    def _leave(self) -> None:
        self._leaving = True

    def __serve_build_asgi_app__(self) -> object:
        """Serve asks for the application once the constructor is through."""
        return self._http

    async def check_health(self) -> None:
        """Raises where this process is at fault. That no node is there is no fault of its own: see `/ready`.

        One that was told to end fails too: Serve then starts another, turns HTTP away from this one, lets its requests
        end, and ends it."""
        if self._leaving:
            raise Unavailable("the orchestrator was told to end (SIGTERM)")
        if self._replica is not None and (failure := self._replica.failure()) is not None:
            raise InternalError(f"the orchestrator's node membership ended: {failure!r}")

    async def __del__(self) -> None:
        """Serve's hook before a replica goes, its HTTP requests ended or out of time by then."""
        if self._replica is not None:
            await self._replica.drain()
            await self._replica.stop()
            await self._presence.stop()
            await self._registry.close()
