"""What Serve is asked for, as its declarative configuration (ServeDeploySchema): plain data, of which Ray knows nothing
yet.

No password stands in what is printed: there an empty `redis_url` is that of the environment of the Ray cluster.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.config import APPLICATION_NAME, ClusterConfig
from cluster.config_problems import redacted

IMPORT_PATH = "cluster.build:app"


def deploy_schema(config: ClusterConfig, args: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Sizes stand beside the arguments, whose change replaces every replica."""
    application = {
        "name": APPLICATION_NAME,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": args,
        "deployments": [{"name": name, "num_replicas": size} for name, size in sorted(sizes.items())],
    }
    http = {"host": config.host, "port": config.port}
    return {"proxy_location": config.proxy_location, "http_options": http, "applications": [application]}


def for_others(config: ClusterConfig) -> dict[str, Any]:
    """For whoever deploys it with Serve's own tools."""
    url = config.service.redis_url
    service = config.service if url == redacted(url) else msgspec.structs.replace(config.service, redis_url="")
    return deploy_schema(config, msgspec.to_builtins(service), {})
