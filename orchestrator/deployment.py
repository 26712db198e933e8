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
from orchestrator.api.served_models import ServedModels
from orchestrator.assembly import ROLE, api_settings, identify, start_replica
from orchestrator.collector import settle
from orchestrator.config import parse_configs
from orchestrator.measured import MeasuredGenerator
from orchestrator.presence import Presence
from orchestrator.replicas import Replicas
from pipelines.text.tokenizer import TextTokenizer
from pronghorn.clock import SystemClock
from pronghorn.errors import InternalError, Unavailable
from pronghorn.sigterm import hear_sigterm


@serve.ingress()
class OrchestratorDeployment:
    async def __init__(self, configs: list[dict[str, Any]], *nodes: object) -> None:  # type: ignore[misc]  # Serve awaits it
        """`configs` are OrchestratorConfigs as plain data, one a model and alike in all that is not of a model; `nodes`
        are bound only to belong to the application.

        Raises ConfigurationError naming the field or file at fault, Unavailable where the registry does not answer.
        """
        self._replicas: Replicas | None = None
        self._leaving = False
        parsed = parse_configs(configs)
        shared = parsed[0]
        started_unix_s = int(time.time())
        models = ServedModels(
            [(TextTokenizer.from_folder(one.model_path), api_settings(one, started_unix_s)) for one in parsed]
        )
        self._registry = open_registry(shared.redis_url, shared.key_prefix, shared.kv_cache_hash_seed)
        name = f"{ROLE}-{serve.get_replica_context().replica_tag}"
        identity = await identify(name, shared, self._registry)
        replicas = Replicas([await start_replica(identity, one, self._registry) for one in parsed])
        self._replicas = replicas
        self._presence = Presence(replicas, identity, self._registry, shared.lease_s)
        await self._presence.start(shared.operations_host or ray.util.get_node_ip_address())
        measured = MeasuredGenerator(replicas, self._presence.requests, SystemClock())
        self._http = build_app(measured, replicas, models, self._presence.operations)
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
        if self._replicas is not None and (failure := self._replicas.failure()) is not None:
            raise InternalError(f"the orchestrator's node membership ended: {failure!r}")

    async def __del__(self) -> None:
        """Serve's hook before a replica goes, its HTTP requests ended or out of time by then."""
        if self._replicas is not None:
            await self._replicas.drain()
            await self._replicas.stop()
            await self._presence.stop()
            await self._registry.close()
