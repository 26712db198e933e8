"""The directory of record: which life of which node has which blocks. A port.

A row may be wrong for a while, as everything is that somebody else says of a cache: whoever asks a holder finds out.
What it must never do is revive what a dead or older life of a node had: rows are written and counted only under the
incarnation that holds the node's name. Versions: `memory_directory.py`, `redis_directory.py`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvcache.hashing import BlockHash
from pronghorn.ids import Incarnation, NodeName

DIRECTORY_KEY_BYTES = 16
"""Of a hash, in a row's key: enough that no two blocks of a cluster share one."""


class BlockDirectory(Protocol):
    """Every method raises Unavailable where the directory does not answer in time. Hashes are whole digests."""

    async def open(self, name: NodeName, incarnation: Incarnation, registered_at_unix_s: float) -> None:
        """From now on this life holds the name, with no block; what an older one held is gone. NodeRefused
        (`superseded`) where a life as new or newer holds it. Again by the same life: nothing but its rows go."""

    async def stored(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """Write rows; how many there was room for. NodeRefused (`superseded`) where another life holds the name, or
        (`unknown`) nobody does: what was written is lost, and all has to be written again."""

    async def removed(self, name: NodeName, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        """Take rows out; raises as `stored`."""

    async def close_node(self, name: NodeName, incarnation: Incarnation) -> None:
        """The life has ended: its rows go. Nothing where another holds the name."""

    async def depths(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, int]:
        """Of each life that has the first of these blocks: how many of the first it has without a gap."""

    def rows(self) -> AsyncIterator[tuple[Incarnation, list[bytes]]]:
        """Everything, as runs of one life's keys, the first `DIRECTORY_KEY_BYTES` of each hash: for whoever starts."""

    async def close(self) -> None: ...
