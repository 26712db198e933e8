"""What a prefill node is told at its start, beside what every node is told."""

import msgspec

from pipelines.node.config import NodeConfig


class PrefillNodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: NodeConfig
    progress_period_s: float = 0.3
    """How often a hand-over that has nothing to send says that it is alive."""
    quiet_engine_s: float = 5.0
    """An engine that has reported nothing for this long is no longer vouched for; well above its longest step."""
    linger_s: float = 1.0
    """A draining node goes when no hand-over has run for this long: requests that were given to decode nodes before
    the orchestrators heard of the drain still come."""
