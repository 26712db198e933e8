"""The frames of a hand-over: bytes in, verified blocks out. Pure: knows no socket, no task, no block id.

A hand-over names blocks by their position in the prompt. Every frame is one message of the stream:

    frame    "PT" version:u8 kind:u8 body
    MESSAGE  payload, opaque here
    BLOCKS   pieces:u32, then a header for each piece, then the bytes of each piece in the same order
             header: position:u32 offset:u32 length:u32 block_bytes:u32 digest:16 (XXH3-128 of the whole block)
    COMMIT   blocks:u32 digest:16 (XXH3-128 over position:u32 digest:16 of every block sent, by position)
    SHARED   a header for each block: position:u32 block_bytes:u32 at:u64 digest:16. In the stead of BLOCKS where the
             receiver sees the sender's block memory: the bytes lie there from `at` on, until the sender goes on

All integers are little-endian. Small blocks share a frame; a large one is split, its pieces in order. Nothing received
counts before `BlockReceiver.commit` returns: until then the destination holds bytes, not blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from struct import Struct
from typing import NamedTuple

import xxhash

from kvcache.digested_copy import copy_all_digested, copy_digested
from pronghorn.errors import TransferFailed

TARGET_FRAME_BYTES = 1 << 20
"""Payload aimed at. Processor time of both sides on gRPC: 2.7 s/GB at 128 KiB, 1.9 at 256 and 512 KiB, 1.5 here; at
2 MiB as much, and a tenth fewer GB/s."""
SHARED_FRAME_BYTES = 8 << 20
"""Bytes of blocks that one SHARED frame names. It carries none, and each frame wakes both processes and a thread."""

_HEADER = Struct("<2sBB")
_COUNT = Struct("<I")
_PIECE = Struct("<IIII16s")
_COMMIT = Struct("<I16s")
_SHARED = Struct("<IIQ16s")
_SENT = Struct("<I16s")
_MAGIC = b"PT"
_VERSION = 1
_MESSAGE_KIND, _BLOCKS_KIND, _COMMIT_KIND, _SHARED_KIND = 1, 2, 3, 4


class Refusal(StrEnum):
    """Why a receiver refused: the `code` of its TransferFailed, and a reason for a counter."""

    BAD_FRAME = "bad_frame"
    WRONG_POSITION = "wrong_position"
    WRONG_SIZE = "wrong_size"
    DUPLICATE_BLOCK = "duplicate_block"
    TORN_BLOCK = "torn_block"
    WRONG_DIGEST = "wrong_digest"
    INCOMPLETE = "incomplete"
    WRONG_COMMIT = "wrong_commit"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class MessageFrame:
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """`data` are the bytes of the block at `position`, from `offset` on; a view into the frame."""

    position: int
    offset: int
    block_bytes: int
    digest: bytes
    data: memoryview


@dataclass(frozen=True, slots=True)
class BlocksFrame:
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class CommitFrame:
    blocks: int
    digest: bytes


Frame = MessageFrame | BlocksFrame | CommitFrame


class Carriage(NamedTuple):
    """How the blocks of one stream are carried: `encode_blocks`, or `encode_shared` of one memory."""

    encode: Callable[[Iterable[tuple[int, memoryview]], dict[int, bytes]], Iterator[bytes]]
    frame_bytes: int
    """Blocks of so many bytes go into a frame; a holder encodes no more at once."""

    def blocks_per_frame(self, block_bytes: int) -> int:
        fill = -(-self.frame_bytes // block_bytes)
        return fill if fill * block_bytes <= self.frame_bytes + _slack(self.frame_bytes) else max(1, fill - 1)


def _slack(target_frame_bytes: int) -> int:
    """A frame may be so much larger than it aims at, rather than carry one block alone that is smaller: two of 720 KiB
    took 1.07 s a GB of both processes in one frame, and 1.12 in two."""
    return target_frame_bytes // 2


def block_digest(block: bytes | memoryview) -> bytes:
    return bytes(xxhash.xxh3_128_digest(block))


Digest = Callable[[memoryview], bytes]
"""Of a block that leaves: `block_digest`, or what is remembered of it (`block_digests.py`)."""


def encode_message(payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, _MESSAGE_KIND) + payload


def encode_blocks(
    blocks: Iterable[tuple[int, memoryview]],
    sent: dict[int, bytes],
    target_frame_bytes: int = TARGET_FRAME_BYTES,
    digest_of: Digest = block_digest,
) -> Iterator[bytes]:
    """Frames that carry `blocks`, pairs of position and bytes, in the order given.

    `sent` maps each position of this hand-over to its digest: an empty dict at its start, filled here, used again by
    each later call and by `encode_commit`. ValueError where a position was sent before. A block is read twice, when
    it is digested and when it is copied into a frame: it must not change until the frame is made.
    """
    batch: list[Piece] = []
    room = target_frame_bytes
    for position, block in blocks:
        if position in sent:
            raise ValueError(f"block position {position} was sent already")
        sent[position] = digest = digest_of(block)
        if batch and len(block) > room + (_slack(target_frame_bytes) if len(block) <= target_frame_bytes else 0):
            yield _blocks_frame(batch)
            batch, room = [], target_frame_bytes
        for offset in range(0, len(block), target_frame_bytes):
            data = block[offset : offset + target_frame_bytes]
            batch.append(Piece(position, offset, len(block), digest, data))
            room -= len(data)
            if room <= 0:
                yield _blocks_frame(batch)
                batch, room = [], target_frame_bytes
    if batch:
        yield _blocks_frame(batch)


IN_FRAMES = Carriage(encode_blocks, TARGET_FRAME_BYTES)
"""For a receiver that sees nothing but what it is sent."""


def in_frames(digest_of: Digest) -> Carriage:
    return Carriage(partial(encode_blocks, digest_of=digest_of), TARGET_FRAME_BYTES)


def encode_shared(
    blocks: Iterable[tuple[int, memoryview]],
    sent: dict[int, bytes],
    place: Callable[[memoryview], int],
    target_frame_bytes: int = SHARED_FRAME_BYTES,
    digest_of: Digest = block_digest,
) -> Iterator[bytes]:
    """As `encode_blocks`, for a receiver that sees the memory in which the blocks lie, each at `place(block)`.

    A block must not change until the receiver has said that it has taken the frame.
    """
    headers: list[bytes] = []
    room = target_frame_bytes
    for position, block in blocks:
        if position in sent:
            raise ValueError(f"block position {position} was sent already")
        sent[position] = digest = digest_of(block)
        headers.append(_SHARED.pack(position, len(block), place(block), digest))
        room -= len(block)
        if room <= 0:
            yield _shared_frame(headers)
            headers, room = [], target_frame_bytes
    if headers:
        yield _shared_frame(headers)


def is_shared(frame: bytes) -> bool:
    return frame[: _HEADER.size] == _HEADER.pack(_MAGIC, _VERSION, _SHARED_KIND)


def is_commit(frame: bytes) -> bool:
    return frame[: _HEADER.size] == _HEADER.pack(_MAGIC, _VERSION, _COMMIT_KIND)


def decode_shared(frame: bytes, memory: memoryview) -> BlocksFrame:
    """The blocks of a SHARED frame, as views into `memory`. TransferFailed (`bad_frame`) where one lies outside it."""
    body = memoryview(frame)[_HEADER.size :]
    if not is_shared(frame) or not body or len(body) % _SHARED.size:
        raise _refused(Refusal.BAD_FRAME, f"{len(body)} bytes are no headers of shared blocks")
    pieces = []
    for position, block_bytes, at, digest in _SHARED.iter_unpack(body):
        if block_bytes == 0 or at + block_bytes > len(memory):
            raise _refused(Refusal.BAD_FRAME, f"{block_bytes} bytes at {at} lie outside a memory of {len(memory)}")
        pieces.append(Piece(position, 0, block_bytes, digest, memory[at : at + block_bytes]))
    return BlocksFrame(pieces)


def encode_commit(sent: Mapping[int, bytes]) -> bytes:
    """The last frame: these positions, with these digests, and no others, were sent."""
    return _HEADER.pack(_MAGIC, _VERSION, _COMMIT_KIND) + _COMMIT.pack(len(sent), _commit_digest(sent))


def decode(frame: bytes | memoryview) -> Frame:
    """What `frame` carries, as views into it. TransferFailed (`bad_frame`) on anything not made by this file."""
    view = memoryview(frame).cast("B")
    if len(view) < _HEADER.size:
        raise _refused(Refusal.BAD_FRAME, f"a frame of {len(view)} bytes is too short")
    magic, version, kind = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != _MAGIC or version != _VERSION:
        raise _refused(Refusal.BAD_FRAME, f"a frame begins with {magic!r} version {version}")
    if kind == _MESSAGE_KIND:
        return MessageFrame(body)
    if kind == _BLOCKS_KIND:
        return BlocksFrame(_pieces(body))
    if kind == _COMMIT_KIND and len(body) == _COMMIT.size:
        return CommitFrame(*_COMMIT.unpack(body))
    raise _refused(Refusal.BAD_FRAME, f"a frame of kind {kind} has a body of {len(body)} bytes")


@dataclass(slots=True)
class _Arrival:
    """One wanted block on its way."""

    destination: memoryview
    arrived_bytes: int = 0
    digest: bytes | None = None
    verified: bool = False
    """All of it is here, and has its digest."""


@dataclass(slots=True)
class Copying:
    """Whole blocks of one frame on their way into their destinations."""

    blocks: list[tuple[int, "_Arrival", memoryview, bytes]]
    """Position, place, the bytes where they lie, and the digest that they came with."""
    digests: list[bytes] = field(default_factory=list)
    """Of what was copied."""

    def copy(self) -> None:
        """Once, in whichever thread: it touches nothing but the bytes."""
        self.digests = copy_all_digested([(arrival.destination, data) for _, arrival, data, _ in self.blocks])


@dataclass(slots=True)
class BlockReceiver:
    """Writes the wanted blocks into their destinations, and vouches for them after `commit`, not before.

    Every refusal is a TransferFailed with a `Refusal` as its code, and final: the receiver takes nothing afterwards,
    so a sender that was caught once cannot go on to commit.
    """

    wanted: Mapping[int, memoryview]
    """Block position to its destination, writable, whole blocks. The caller owns the memory."""
    received_bytes: int = 0
    committed: bool = False
    _arrivals: dict[int, _Arrival] = field(init=False)
    _failure: TransferFailed | None = None

    def __post_init__(self) -> None:
        self._arrivals = {position: _Arrival(memory.cast("B")) for position, memory in self.wanted.items()}

    def accept(self, frame: BlocksFrame) -> list[int]:
        """Write the pieces of `frame`; the positions that are complete and verified now. The frame is empty then: its
        memory is free for the next one, while the caches still hold it."""
        self._require_open()
        complete = [piece.position for piece in frame.pieces if self._write(piece)]
        frame.pieces.clear()
        return complete

    def begin(self, frame: BlocksFrame) -> Copying:
        """As `accept`, for a frame of whole blocks that stay where they are until they were copied: somebody calls
        `copy` of the result, and then `settle` with it, and neither frees a destination before."""
        self._require_open()
        copying = Copying([])
        for piece in frame.pieces:
            arrival = self._expected(piece)
            if len(piece.data) != piece.block_bytes:
                raise self._fail(Refusal.TORN_BLOCK, f"the block at position {piece.position} is not whole")
            arrival.arrived_bytes, arrival.digest = piece.block_bytes, piece.digest
            copying.blocks.append((piece.position, arrival, piece.data, piece.digest))
        frame.pieces.clear()
        return copying

    def settle(self, copying: Copying) -> list[int]:
        """The blocks were copied: their positions, verified now."""
        for (position, arrival, data, digest), came in zip(copying.blocks, copying.digests, strict=True):
            self._verify(position, arrival, came, digest)
            self.received_bytes += len(data)
        return [position for position, *_ in copying.blocks]

    def commit(self, frame: CommitFrame) -> None:
        """Returns only where every wanted block is here, verified, and what the sender says it sent."""
        self._require_open()
        absent = [position for position, arrival in self._arrivals.items() if not arrival.verified]
        if absent:
            raise self._fail(
                Refusal.INCOMPLETE, f"{len(absent)} of {len(self.wanted)} blocks are not here: {absent[:8]}"
            )
        if frame.blocks != len(self.wanted):
            raise self._fail(Refusal.WRONG_COMMIT, f"{frame.blocks} blocks were sent, {len(self.wanted)} wanted")
        if frame.digest != _commit_digest({p: a.digest or b"" for p, a in self._arrivals.items()}):
            raise self._fail(Refusal.WRONG_COMMIT, "the sender committed other blocks than those that arrived")
        self.committed = True

    @property
    def leading(self) -> int:
        """How many blocks from position 0 on are here and have the digest that they came with."""
        count = 0
        while (arrival := self._arrivals.get(count)) is not None and arrival.verified:
            count += 1
        return count

    def commit_what_came(self, frame: CommitFrame) -> None:
        """As `commit`, for a sender that may have had fewer blocks than were wanted: what it says it sent is here."""
        self._require_open()
        came = {p: arrival.digest or b"" for p, arrival in self._arrivals.items() if arrival.verified}
        if frame.blocks != len(came) or frame.digest != _commit_digest(came):
            raise self._fail(Refusal.WRONG_COMMIT, f"{frame.blocks} blocks were committed, {len(came)} others came")
        self.committed = True

    def _expected(self, piece: Piece) -> _Arrival:
        """Where it goes."""
        arrival = self._arrivals.get(piece.position)
        if arrival is None:
            raise self._fail(Refusal.WRONG_POSITION, f"the block at position {piece.position} was not asked for")
        size = len(arrival.destination)
        where = f"the block at position {piece.position}"
        if piece.block_bytes != size:
            raise self._fail(Refusal.WRONG_SIZE, f"{where} is {piece.block_bytes} bytes there and {size} here")
        if arrival.arrived_bytes == size:
            raise self._fail(Refusal.DUPLICATE_BLOCK, f"{where} arrived a second time")
        if piece.offset != arrival.arrived_bytes or (arrival.digest is not None and piece.digest != arrival.digest):
            raise self._fail(
                Refusal.TORN_BLOCK, f"{where} goes on at {piece.offset} after {arrival.arrived_bytes} bytes"
            )
        return arrival

    def _write(self, piece: Piece) -> bool:
        arrival = self._expected(piece)
        size = len(arrival.destination)
        end = piece.offset + len(piece.data)
        whole = len(piece.data) == size
        if whole:
            came = copy_digested(arrival.destination, piece.data)
        else:
            arrival.destination[piece.offset : end] = piece.data
        arrival.arrived_bytes = end
        arrival.digest = piece.digest
        self.received_bytes += len(piece.data)
        if end < size:
            return False
        self._verify(piece.position, arrival, came if whole else block_digest(arrival.destination), piece.digest)
        return True

    def _verify(self, position: int, arrival: _Arrival, came: bytes, digest: bytes) -> None:
        if came != digest:
            raise self._fail(
                Refusal.WRONG_DIGEST, f"the block at position {position} does not have the digest that it came with"
            )
        arrival.verified = True

    def _require_open(self) -> None:
        if self._failure is not None:
            raise _refused(Refusal.ENDED, f"the transfer failed before: {self._failure}")
        if self.committed:
            raise _refused(Refusal.ENDED, "a frame came after the commit")

    def _fail(self, refusal: Refusal, message: str) -> TransferFailed:
        self._failure = _refused(refusal, message)
        return self._failure


def _pieces(body: memoryview) -> list[Piece]:
    if len(body) < _COUNT.size:
        raise _refused(Refusal.BAD_FRAME, "a frame of blocks does not say how many pieces it carries")
    (count,) = _COUNT.unpack_from(body)
    start = _COUNT.size + count * _PIECE.size
    if count == 0 or start > len(body):
        raise _refused(Refusal.BAD_FRAME, f"{count} pieces do not fit a frame of {len(body)} bytes")
    pieces = []
    for position, offset, length, block_bytes, digest in _PIECE.iter_unpack(body[_COUNT.size : start]):
        if length == 0 or offset + length > block_bytes or start + length > len(body):
            raise _refused(Refusal.BAD_FRAME, f"a piece of {length} bytes at {offset} fits neither block nor frame")
        pieces.append(Piece(position, offset, block_bytes, digest, body[start : start + length]))
        start += length
    if start != len(body):
        raise _refused(Refusal.BAD_FRAME, f"{len(body) - start} bytes follow the last piece of a frame")
    return pieces


def _blocks_frame(pieces: list[Piece]) -> bytes:
    headers = [_PIECE.pack(p.position, p.offset, len(p.data), p.block_bytes, p.digest) for p in pieces]
    head = _HEADER.pack(_MAGIC, _VERSION, _BLOCKS_KIND) + _COUNT.pack(len(pieces))
    return b"".join([head, *headers, *(p.data for p in pieces)])


def _shared_frame(headers: list[bytes]) -> bytes:
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, _SHARED_KIND), *headers])


def _commit_digest(sent: Mapping[int, bytes]) -> bytes:
    return bytes(xxhash.xxh3_128_digest(b"".join(_SENT.pack(p, sent[p]) for p in sorted(sent))))


def _refused(refusal: Refusal, message: str) -> TransferFailed:
    return TransferFailed(message, code=refusal.value)
