"""The `dkv_cache_hint` that a request leaves with: who is known here to hold how much of its prompt.

Pure. Written in the schema of `kvcache/connector.py`, version 1; what the client's own hint names beyond that follows,
since the node checks every block of it anyway.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcache.connector import HINT_VERSION, MAX_HINT_INSTANCES, parse_hint
from kvcache.hashing import BlockHash
from pronghorn.ids import NodeName


def routed_hint(
    held: Sequence[tuple[NodeName, int]],
    hashes: Sequence[BlockHash],
    name_of: Callable[[BlockHash], str],
    clients: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """`held`: by node, how many of the leading blocks in `hashes`. Where nothing is known, the client's as it came."""
    instances = [{"name": str(name), "blocks": n, "last_hash": name_of(hashes[n - 1])} for name, n in held if n]
    if not instances:
        return None if clients is None else dict(clients)
    known = {name for name, _ in held}
    theirs = parse_hint(clients)
    for instance in theirs.instances if theirs is not None else ():
        if instance.name not in known:
            instances.append({"name": instance.name, "blocks": instance.blocks, "last_hash": instance.last_hash})
    return {"version": HINT_VERSION, "instances": instances[:MAX_HINT_INSTANCES]}
