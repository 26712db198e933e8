"""The directory of record: which life of which node has which blocks. A port.

A row may be wrong for a while, as everything is that somebody else says of a cache: whoever asks a holder finds out.
What it must never do is revive what a dead or older life of a node had: rows are written only by the life that holds
the node's name, and count only while it does. A life holds its name for `LEASE_S` after its last word. Versions:
`memory_directory.py`, `redis_directory.py`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvcache.hashing import BlockHash
from pronghorn.errors import NodeRefused
from pronghorn.ids import Incarnation, NodeName

KEY_BYTES = 16
"""Of a hash, in a row's key: enough that no two blocks of a cluster share one."""
LEASE_S = 10.0


def superseded(name: NodeName, incarnation: Incarnation, by: str) -> NodeRefused:
    return NodeRefused(f"{name} is held by {by} in the directory; {incarnation} cannot write there", code="superseded")


def unknown(name: NodeName, incarnation: Incarnation) -> NodeRefused:
    return NodeRefused(f"the directory knows nothing of {name} ({incarnation}) any more", code="unknown")


class BlockDirectory(Protocol):
    """Every method raises Unavailable where the directory does not answer in time. Hashes are whole digests.

    The methods for a node's own rows raise NodeRefused: `superseded` where another life holds the name, `unknown` where
    nobody does, so that everything has to be written again."""

    async def open(self, name: NodeName, incarnation: Incarnation, registered_at_unix_s: float) -> None:
        """From now on this life holds the name, with no block; what an older one, or this one, had is gone. Refused as
        `superseded` where a life that registered as late or later holds it."""

    async def stored(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """Write rows, those that are there already included; how many of the first there was room for."""

    async def removed(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None: ...

    async def refresh(self, name: NodeName, incarnation: Incarnation) -> None:
        """Hold the name for another lease, and clear a bounded amount of what lives without one have left."""

    async def leave(self, name: NodeName, incarnation: Incarnation) -> None:
        """The life has ended, and with it its rows. Never refused."""

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        """Of each life that has the first of these blocks: how many of the first it has without a gap."""

    def rows(self) -> AsyncIterator[tuple[Incarnation, list[bytes]]]:
        """Everything, as runs of one life's keys, the first `KEY_BYTES` of each hash: for whoever starts. What
        changes meanwhile may be missing, or still be there."""

    async def close(self) -> None: ...
