"""How a replica is put together to serve: sessions over gRPC, an identity of its own, what its HTTP side is told."""

import importlib.metadata
from random import Random

import msgspec

from kvcache.handshake import Identity
from kvcache.hashing import seed_digest
from kvcache.registry import NodeRegistry
from orchestrator.api.settings import ApiSettings
from orchestrator.config import OrchestratorConfig
from orchestrator.node_client import GrpcConnector
from orchestrator.replica import Replica
from pronghorn.clock import SystemClock
from pronghorn.credentials import Credentials
from pronghorn.ids import new_incarnation

ROLE = "orchestrator"


async def identify(name: str, config: OrchestratorConfig, registry: NodeRegistry) -> Identity:
    """A new life, the same for every model. Raises Unavailable where the registry does not answer."""
    return Identity(
        role=ROLE,
        name=name,
        incarnation=new_incarnation(),
        model=config.model_name,
        seed_digest=seed_digest(await registry.cluster_seed()),
    )


async def start_replica(identity: Identity, config: OrchestratorConfig, registry: NodeRegistry) -> Replica:
    """A replica that looks for the nodes of its model. Raises Unavailable where the registry does not answer."""
    identity = msgspec.structs.replace(identity, model=config.model_name)
    seed = await registry.cluster_seed()
    new_channel = Credentials(config.tls).channel
    connector = GrpcConnector(identity, config.connect_timeout_s, config.send_queue_frames, new_channel)
    replica = Replica(config, registry, connector, SystemClock(), seed=seed, random=Random(identity.incarnation))
    replica.start()
    return replica


def api_settings(config: OrchestratorConfig, started_unix_s: int) -> ApiSettings:
    return ApiSettings(
        model_name=config.model_name,
        max_length=config.max_length,
        version=importlib.metadata.version("pronghorn"),
        created_unix_s=started_unix_s,
        default_deadline_s=config.default_deadline_s,
        max_request_bytes=config.max_request_bytes,
        retry_after_s=config.retry_after_s,
        most_urgent_priority=config.most_urgent_priority,
        share_header=config.share_header,
        use_client_cache_salt=config.use_client_cache_salt,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        emit_reasoning_content=config.emit_reasoning_content,
        structured_output=config.structured_output,
        logits_processors=frozenset(config.logits_processors),
        prefix_caching=config.prefix_caching,
    )
