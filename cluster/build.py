"""The composition root: which concrete classes make up the Serve application, and with which options.

`cluster.build:app` is what `serve deploy` and a RayService name as `import_path`; its `args` are a `ServiceConfig` as
plain data, where an empty `redis_url` stands for that of the environment: a password is in no manifest then. The data
path does not go through Serve: the nodes are bound only so that they belong to the application.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from cluster import config
from cluster.config import ServiceConfig
from cluster.model_config import pool
from cluster.setting_types import Placement
from decode_nodes.deployment import DecodeNodeDeployment
from orchestrator.deployment import OrchestratorDeployment
from prefill_nodes.deployment import PrefillNodeDeployment
from pronghorn.wire import GRPC_ENVIRONMENT

HEALTH_CHECK_PERIOD_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 10.0
"""Serve replaces a replica after three checks in a row that fail or take longer than this."""
SHUTDOWN_MARGIN_S = 20.0
"""What a replica may take to stop beyond its drain; Serve then kills it."""
CONSTRUCTOR_RETRIES = 3
ONE_MORE_PERCENT = 1
"""How many replicas a rolling change may start before it stops old ones; Serve rounds up, to one."""
REFUSING = 64
"""Requests of an orchestrator that are read or refused beside those that run or wait: it refuses them, not Serve."""
COUNTED_BYTES = 1
"""What each replica takes of a machine's memory in Ray's books: Ray puts an actor that takes nothing on any machine at
random, whether it was to be spread or packed."""
NODE_REQUESTS = 16
"""Calls through Serve handles that a node takes at once. Nobody makes any; its work comes by gRPC."""


def app(args: dict[str, Any]) -> Application:
    """Raises ConfigurationError naming the field at fault."""
    service = config.with_redis(config.parse(args, ServiceConfig), config.environment())
    models = service.each
    nodes = [
        _node(deployment, role, getattr(model, role), model, model.model_name if service.models else None)
        for model in models
        for role, deployment in (("decode", DecodeNodeDeployment), ("prefill", PrefillNodeDeployment))
        if getattr(model, role)
    ]
    ingress = serve.deployment(
        OrchestratorDeployment,
        name="orchestrator",
        num_replicas=service.orchestrators,
        max_ongoing_requests=sum(model.max_in_flight + service.max_queue + REFUSING for model in models),
        **_placed(service.placement.orchestrator, gpus=0),
        **_lifecycle(service),
    )
    return ingress.bind([config.orchestrator(model) for model in models], *nodes)


def _node(deployment: type, role: str, replicas: int, service: ServiceConfig, model: str | None) -> Application:
    return serve.deployment(
        deployment,
        name=pool(role, model),
        num_replicas=replicas,
        max_ongoing_requests=NODE_REQUESTS,
        **_placed(getattr(service.placement, role), gpus=1 if service.device == "cuda" else 0),
        **_lifecycle(service),
    ).bind({"node": config.node(service)})


def _placed(placement: Placement, gpus: int) -> dict[str, Any]:
    # The engine's threads are set by us, and two engines may share a core: CPUs are no resource here, GPUs are.
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": gpus,
        "memory": COUNTED_BYTES,
        "runtime_env": {"env_vars": dict(GRPC_ENVIRONMENT)},
    }
    if placement.labels:
        options["label_selector"] = placement.labels
    if placement.resources:
        options["resources"] = placement.resources
    # A new replica waits for ever for a place where none is spare; there the old one goes first.
    bounded = gpus or placement.resources or placement.max_per_machine is not None
    placed = {"ray_actor_options": options, "max_surge_percent": 0 if bounded else ONE_MORE_PERCENT}
    return (
        placed if placement.max_per_machine is None else placed | {"max_replicas_per_node": placement.max_per_machine}
    )


def _lifecycle(service: ServiceConfig) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": service.drain_timeout_s + SHUTDOWN_MARGIN_S,
        # Slept before a replica is told to stop; 2 s by default, for handle traffic that there is none of.
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": CONSTRUCTOR_RETRIES,
    }
