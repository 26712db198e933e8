"""Who is speaking, and everything on which two nodes must agree before one takes the other's blocks. Pure."""

from typing import Final

import msgspec

from pronghorn.errors import HandshakeRefused
from pronghorn.wire import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from protos.node_pb2 import Hello

_REQUIRED: Final = ("role", "name", "incarnation", "model")


class Identity(msgspec.Struct, frozen=True):
    """One life of one node or orchestrator, as it introduces itself."""

    role: str
    """"orchestrator", "prefill" or "decode"."""
    name: str
    incarnation: str
    model: str
    layout: dict[str, str] = {}
    """`KVLayout.fingerprint()`; empty for an orchestrator, which holds no blocks."""
    seed_digest: str = ""
    """`hashing.seed_digest` of the cluster's seed, never the seed."""
    protocol_version: int = PROTOCOL_VERSION
    oldest_protocol_version: int = OLDEST_PROTOCOL_VERSION

    def to_hello(self) -> Hello:
        return Hello(**msgspec.structs.asdict(self))

    @classmethod
    def from_hello(cls, hello: Hello) -> "Identity":
        """HandshakeRefused, naming the field, where the peer leaves out who it is."""
        for name in _REQUIRED:
            if not getattr(hello, name):
                raise HandshakeRefused(f"the peer's hello has no {name}", param=name)
        return cls(
            role=hello.role,
            name=hello.name,
            incarnation=hello.incarnation,
            model=hello.model,
            layout=dict(hello.layout),
            seed_digest=hello.seed_digest,
            protocol_version=hello.protocol_version,
            oldest_protocol_version=hello.oldest_protocol_version,
        )


def check_peer(
    ours: Identity,
    theirs: Identity,
    *,
    expect_incarnation: str | None = None,
    compare_layout: bool = True,
) -> None:
    """HandshakeRefused, naming the first field that differs (`param`) with both values, where the two may not speak.

    Versions agree where each speaks one that the other still understands. `expect_incarnation` is the life that was
    chosen: another process under the same address is refused. `compare_layout` is for peers that exchange blocks:
    layout and hash seed must agree then.
    """
    if ours.protocol_version < theirs.oldest_protocol_version or theirs.protocol_version < ours.oldest_protocol_version:
        raise _refused(theirs, "protocol_version", _versions(ours), _versions(theirs))
    if expect_incarnation is not None and theirs.incarnation != expect_incarnation:
        raise _refused(theirs, "incarnation", expect_incarnation, theirs.incarnation)
    if theirs.model != ours.model:
        raise _refused(theirs, "model", ours.model, theirs.model)
    if not compare_layout:
        return
    for name in sorted(ours.layout.keys() | theirs.layout.keys()):
        if ours.layout.get(name) != theirs.layout.get(name):
            raise _refused(theirs, f"layout.{name}", ours.layout.get(name), theirs.layout.get(name))
    if theirs.seed_digest != ours.seed_digest:
        raise _refused(theirs, "seed_digest", ours.seed_digest, theirs.seed_digest)


def _versions(identity: Identity) -> str:
    return f"{identity.oldest_protocol_version}..{identity.protocol_version}"


def _refused(theirs: Identity, field: str, our_value: str | None, their_value: str | None) -> HandshakeRefused:
    return HandshakeRefused(
        f"{theirs.role} {theirs.name}: {field} is {their_value!r} there and {our_value!r} here", param=field
    )
