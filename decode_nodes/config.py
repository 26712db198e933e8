"""What a decode node is told at its start, beside what every node is told."""

import msgspec

from pipelines.node.config import NodeConfig


class DecodeNodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: NodeConfig
    stall_timeout_s: float = 1.5
    """A prefill node that says nothing on a hand-over for this long has failed; it speaks every 0.3 s."""
    max_local_prefill_tokens: int = 65_536
    """Prompt tokens that may wait here to be computed in the stead of prefill nodes that failed or are gone."""
    idle_channel_s: float = 60.0
    """A channel to a prefill node is closed when it has carried nothing for this long."""
