"""The question that opens a fetch of blocks from another node, and what its holder says beside the blocks.

    asker -> holder    `FetchRequest`, protobuf: whole hashes, in the order of their chain
    holder -> asker    frames of `transfer.py`: a MESSAGE with `Opened`; MESSAGEs with `Stock` and BLOCKS, whose
                       positions count from the first hash asked for; COMMIT. Or `Declined` anywhere, the end

A holder streams the run of blocks that leads the hashes, as far as it has them, and goes on while more of it is being
computed there. Knows hashes and identities; neither requests nor sockets. What is asked for is named by whole digests
that only who knows prompt, seed and salt can make, so that asking opens nobody's cache.
"""

import msgspec
from google.protobuf.message import DecodeError

from kvcache.handshake import Identity
from kvcache.hashing import BlockHash
from pronghorn.errors import ErrorRecord, InvalidRequest, TransferFailed
from protos import node_pb2

MAX_BLOCKS = 65_536
"""Of one request: a million tokens in blocks of 16."""
EXPIRED = "lease_expired"
"""The code of `Declined` where the time of a fetch is up; nothing is read afterwards."""


class FetchRequest(msgspec.Struct, frozen=True):
    asker: Identity
    holder_incarnation: str
    """The life of the node that was chosen; another life refuses."""
    hashes: list[BlockHash]
    budget_s: float
    patience_s: float

    def to_bytes(self) -> bytes:
        message = node_pb2.FetchRequest(
            hello=self.asker.to_hello(),
            holder_incarnation=self.holder_incarnation,
            hashes=self.hashes,
            budget_s=self.budget_s,
            patience_s=self.patience_s,
        )
        return message.SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> "FetchRequest":
        """Raises InvalidRequest for bytes that are no such message, or ask for nothing or too much."""
        try:
            message = node_pb2.FetchRequest.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"{len(data)} bytes are not a FetchRequest", param="request") from error
        if not 0 < len(message.hashes) <= MAX_BLOCKS:
            raise InvalidRequest(f"{len(message.hashes)} hashes are asked for, not 1 to {MAX_BLOCKS}", param="hashes")
        return cls(
            asker=Identity.from_hello(message.hello),
            holder_incarnation=message.holder_incarnation,
            hashes=[BlockHash(block_hash) for block_hash in message.hashes],
            budget_s=message.budget_s,
            patience_s=message.patience_s,
        )


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The hello was accepted; `hello` is the holder's own, as protobuf bytes, for the asker to check."""

    hello: bytes


class Stock(msgspec.Struct, frozen=True, tag=True):
    """`blocks` of the first can be had by now; `coming` more behind them are being computed. Also said as a sign of
    life: silence on this stream is a fault."""

    blocks: int
    coming: int


class Declined(msgspec.Struct, frozen=True, tag=True):
    error: ErrorRecord


FetchMessage = Opened | Stock | Declined

_decoder = msgspec.msgpack.Decoder(FetchMessage)


def encode(message: FetchMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(payload: bytes | memoryview) -> FetchMessage:
    """TransferFailed (`malformed`) on anything else."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"a message of a fetch cannot be read: {error}", code="malformed") from error
