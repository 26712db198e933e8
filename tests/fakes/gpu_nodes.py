"""Actors placed as Serve places the nodes of an application, which say where they are: one line of JSON for each.

`python -m tests.fakes.gpu_nodes ADDRESS SERVICE COUNT`, within the environment that the Ray cluster was started with.
"""

import json
import os
import socket
import sys
from typing import Any

import ray

from cluster import build
from decode_nodes.config import DecodeNodeConfig
from pipelines.node.config import parse_config

TIMEOUT_S = 60.0


class Node:
    """Takes the place of a node: same options, same configuration, no engine."""

    def __init__(self, config: dict[str, Any]) -> None:
        placed = parse_config(config, DecodeNodeConfig).node.placed(ray.util.get_node_ip_address)
        self._server = socket.create_server((placed.bind_host, 0))
        self._address = f"{placed.dial_host}:{self._server.getsockname()[1]}"

    def standing(self) -> dict[str, str | None]:
        """Something listens at the address while the actor lives."""
        return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "address": self._address}


def main(address: str, service: dict[str, Any], count: int) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    decode = build.app(service)._bound_deployment.init_args[1]._bound_deployment
    assert decode.name == "decode"
    placed = ray.remote(Node).options(**decode.ray_actor_options)
    nodes = [placed.remote(*decode.init_args) for _ in range(count)]
    for standing in ray.get([node.standing.remote() for node in nodes], timeout=TIMEOUT_S):
        host, port = standing["address"].rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
        sys.stdout.write(json.dumps(standing) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
