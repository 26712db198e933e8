"""Who is in the cluster: a row per living node and orchestrator, under a lease, and the seed that all share. A port.

A row is an address book entry, not a health check: that a lease is live says that its process spoke to the registry
lately. Orchestrators have rows of their own, which nothing that looks for nodes ever sees. Versions:
`memory_registry.py` for tests and one process, `redis_registry.py` for a cluster.
"""

from collections.abc import AsyncIterator
from typing import Literal, Protocol, TypeVar

import msgspec

from pronghorn.errors import NodeRefused
from pronghorn.ids import Incarnation, NodeName


class NodeRecord(msgspec.Struct, frozen=True):
    name: NodeName
    role: Literal["prefill", "decode"]
    model: str
    address: str
    """"host:port" of the node's gRPC server."""
    incarnation: Incarnation
    layout: dict[str, str]
    seed_digest: str
    load: dict[str, float | int]
    host: str
    pid: int
    registered_at_unix_s: float
    """When this incarnation first registered; it stays the same when the lease is refreshed. Of two incarnations that
    claim one name, the later is the newer."""
    operations_address: str | None = None
    """"host:port" of its operations server (`operations/server.py`); None where it has none."""


class OrchestratorRecord(msgspec.Struct, frozen=True):
    """An orchestrator, for those who operate the cluster: no request ever depends on this row."""

    name: NodeName
    model: str
    """The first of `models`."""
    incarnation: Incarnation
    operations_address: str | None
    host: str
    pid: int
    registered_at_unix_s: float
    models: list[str] = []
    """All that it serves; empty in a row of an earlier version, which served `model` alone."""


RowT = TypeVar("RowT", bound=NodeRecord | OrchestratorRecord)


def superseded(record: NodeRecord | OrchestratorRecord, by: str) -> NodeRefused:
    """What `register` raises when a newer incarnation holds the name."""
    return NodeRefused(
        f"{record.name} is held by the newer incarnation {by}; {record.incarnation} cannot register", code="superseded"
    )


class Rows(Protocol[RowT]):
    """Rows of one sort. Every method raises Unavailable where the registry does not answer in time; none waits longer
    than a second or two."""

    async def register(self, record: RowT, lease_s: float) -> None:
        """Write the row and hold it for `lease_s` from now; also how a lease is refreshed and load is reported.

        A newer incarnation takes the name over from an older one. NodeRefused (`superseded`) where the name is held,
        by a live lease, by another incarnation that is as new or newer."""

    async def deregister(self, name: NodeName, incarnation: Incarnation) -> None:
        """Remove the row if it is this incarnation's; else nothing happens."""

    async def list(self) -> "list[RowT]":
        """The rows with a live lease, by name."""


SEED_PERIOD_S = 1.0
"""How often whoever knows the seed says so."""
SEED_GRACE_S = 3 * SEED_PERIOD_S
"""How long whoever starts waits to hear it before making one."""


class NodeRegistry(Rows[NodeRecord], Protocol):
    """The rows of the nodes, and what else a cluster shares."""

    @property
    def orchestrators(self) -> Rows[OrchestratorRecord]:
        """Theirs, beside the nodes' and apart from them: no change here wakes `changes`."""

    def changes(self) -> AsyncIterator[None]:
        """Wakes once when it starts to watch, then after each change of who is here: a node came, left, was taken
        over, or its lease ran out (noticed within about a second). Several changes may be one wake-up. Reports of load
        do not wake. Goes on for ever; an outage of the registry is ridden out, and its end is a wake-up."""

    async def cluster_seed(self) -> bytes:
        """The cluster's hash seed, 32 secret bytes: made by the first who asks, then the same for everyone."""

    async def keep_seed(self, seed: bytes) -> None:
        """Write the seed again where the registry has lost it; never over another. Whoever knows it says so often, so
        that nobody makes a second one after a flush."""

    async def close(self) -> None:
        """Give up connections. Idempotent."""
