"""Messages to bytes and back: msgpack, with hooks for token buffers and numpy.

What may be decoded is closed: the type that the receiver names and the types of its fields. Nothing is imported by name
and nothing is drawn at random; a dataclass's `__post_init__` runs again.
"""

from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from pipelines.types.token_buffer import PackedTokenBuffer, TokenBuffer
from pronghorn.errors import InternalError

T = TypeVar("T")

PackedArray = tuple[str, tuple[int, ...], bytes]
"""dtype in numpy's notation with its byte order, shape, data in C order."""

_PLAIN_KINDS = "biuf"


def _to_builtin(obj: object) -> object:
    if isinstance(obj, TokenBuffer):
        return obj.pack()
    if isinstance(obj, np.ndarray) and obj.dtype.kind in _PLAIN_KINDS:
        little = obj.astype(obj.dtype.newbyteorder("<"), copy=False)
        return little.dtype.str, little.shape, little.tobytes()
    if isinstance(obj, np.bool_ | np.integer | np.floating):
        return obj.item()
    raise NotImplementedError(f"{type(obj).__name__} has no place on the wire")


def _from_builtin(target: type, value: object) -> object:
    if target is TokenBuffer:
        return TokenBuffer.unpack(msgspec.convert(value, PackedTokenBuffer))
    if target is np.ndarray:
        dtype, shape, data = msgspec.convert(value, PackedArray)
        if np.dtype(dtype).kind not in _PLAIN_KINDS:
            raise ValueError(f"an array of {dtype} has no place on the wire")
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    raise NotImplementedError(f"{target.__name__} has no place on the wire")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)


@lru_cache(maxsize=64)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, dec_hook=_from_builtin)


def encode(obj: object) -> bytes:
    """Raises InternalError naming the type for what cannot cross a process."""
    try:
        return _encoder.encode(obj)
    except (NotImplementedError, TypeError, OverflowError, ValueError) as error:
        raise InternalError(f"cannot encode a {type(obj).__name__}: {error}") from error


@overload
def decode(data: bytes | memoryview, type_: type[T]) -> T: ...
@overload
def decode(data: bytes | memoryview, type_: Any) -> Any: ...
def decode(data: bytes | memoryview, type_: Any) -> Any:
    """What `encode` made of an object of `type_`, which may be a union. Raises InternalError naming the type for
    anything else."""
    try:
        return _decoder(type_).decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, NotImplementedError) as error:
        name = getattr(type_, "__name__", str(type_))
        raise InternalError(f"cannot decode {len(data)} bytes as {name}: {error}") from error
