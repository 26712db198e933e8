"""Messages on a byte stream: a length of 4 bytes, little-endian, then that many bytes of msgpack.

Knows bytes; not sockets, nor what the messages mean. Both ends are the same build in one host, so there is no version.
"""

import struct

from pipelines.types import wire

_LENGTH = struct.Struct("<I")

MAX_FRAME_BYTES = 1 << 30
"""A longer one cannot be meant: the stream is damaged."""


def pack(message: object) -> bytes:
    payload = wire.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Bytes in, as they come; the payloads of whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            assert length <= MAX_FRAME_BYTES, f"a frame of {length} bytes: the stream is damaged"
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames
