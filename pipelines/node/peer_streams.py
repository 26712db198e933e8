"""By which ways a node reads streams from other nodes: put together from its configuration."""

from pipelines.node.config import NodeConfig
from pipelines.node.local_client import LocalStreamClient
from pipelines.node.stream_client import StreamClient
from pipelines.node.stream_port import StreamPort
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.credentials import Credentials


def streams_from_nodes(
    method: str, config: NodeConfig, clock: Clock, idle_channel_s: float, counters: Counters
) -> StreamPort:
    remote = StreamClient(
        method,
        clock,
        idle_channel_s,
        credentials=Credentials(config.tls),
        connections=config.connections_per_node,
    )
    if not config.shared_memory:
        return remote
    return LocalStreamClient(method, remote, clock, idle_channel_s, counters)
