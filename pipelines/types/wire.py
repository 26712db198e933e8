"""Messages to bytes and back: msgpack, with hooks for token buffers and numpy.

Two ways to send. `encode` and `decode` make one run of bytes, for the frames and messages of the text path. They are
closed by the type that the receiver names and the types of its fields. `encode_frames` and `decode_frames` are for
everything that a pipeline of any kind takes or gives: they are closed by `REGISTRY` besides, name the type in the first
frame, and put each large array into a frame of its own, which is not copied again on arrival.

Nothing is imported by name and nothing is drawn at random; a dataclass's `__post_init__` runs again. Requests are
`ProcessLocal` and refused on both ways, whole: so `decoded_images` cannot leave the process that decoded them. What
crosses in their place is a context.

Versions N and N-1 read each other: a field that the receiver does not know is ignored, one that the sender did not
know has its default. So a new field always has a default, and no field changes its meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, overload

import msgspec
import numpy as np

from pipelines.types.audio import AudioContext
from pipelines.types.batch import CompletedBatchStats
from pipelines.types.embeddings import EmbeddingsGenerationOutput
from pipelines.types.eos import EOSTracker
from pipelines.types.frames import NodeFrame, OrchestratorFrame
from pipelines.types.generation_output import GenerationOutput
from pipelines.types.handover import HandOverMessage
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.pixel import PixelContext
from pipelines.types.process_local import ProcessLocal
from pipelines.types.sampling import SamplingParams
from pipelines.types.scheduler_result import SchedulerResult
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import PackedTokenBuffer, TokenBuffer
from pipelines.types.vision import TextAndVisionContext
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID

T = TypeVar("T")

REGISTRY: Mapping[str, type] = MappingProxyType(
    {
        type_.__name__: type_
        for type_ in (
            *(TextContext, TextAndVisionContext, PixelContext, AudioContext),
            *(TextGenerationOutput, EmbeddingsGenerationOutput, GenerationOutput, SchedulerResult),
            *(RequestID, SamplingParams, EOSTracker, LogProbabilities, CompletedBatchStats),
            *get_args(OrchestratorFrame),
            *get_args(NodeFrame),
            *get_args(HandOverMessage),
        )
    }
)
"""Every type that `encode_frames` takes, by the name that stands in the first frame; lists and dicts of them too."""

OUT_OF_BAND_BYTES = 64 * 1024
"""From this size on an array has a frame of its own."""

PackedArray = tuple[str, tuple[int, ...], bytes | int]
"""dtype in numpy's notation, little-endian; shape; the data in C order, or the number of the frame that is the data."""

_PLAIN_DTYPES = frozenset(np.dtype(code).newbyteorder("<").str for code in "?bBhHiIqQefd")


def _as_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    little = array.dtype.newbyteorder("<")
    if little.str not in _PLAIN_DTYPES:
        raise NotImplementedError(f"an array of {array.dtype} has no place on the wire")
    return array.astype(little, copy=False)


def _to_builtin(obj: object) -> object:
    if isinstance(obj, TokenBuffer):
        return obj.pack()
    if isinstance(obj, np.ndarray):
        plain = _as_plain(obj)
        return plain.dtype.str, plain.shape, plain.tobytes()
    if isinstance(obj, np.bool_ | np.integer | np.floating):
        return obj.item()
    raise NotImplementedError(f"{type(obj).__name__} has no place on the wire")


def _from_builtin(target: Any, value: object) -> object:
    if target is TokenBuffer:
        return TokenBuffer.unpack(msgspec.convert(value, PackedTokenBuffer))
    if (get_origin(target) or target) is np.ndarray:
        dtype, shape, data = msgspec.convert(value, PackedArray)
        if isinstance(data, int):
            raise ValueError(f"an array lies in frame {data}, and there are no frames")
        return _array(target, dtype, shape, data).copy()
    raise NotImplementedError(f"{getattr(target, '__name__', target)} has no place on the wire")


def _array(target: Any, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> np.ndarray[Any, Any]:
    """A view of `data`. ValueError where it is not what the receiver declares, or size and shape disagree."""
    if dtype not in _PLAIN_DTYPES:
        raise ValueError(f"an array of {dtype} has no place on the wire")
    if any(size < 0 for size in shape) or prod(shape) * np.dtype(dtype).itemsize != memoryview(data).nbytes:
        raise ValueError(f"{memoryview(data).nbytes} bytes are not an array of {dtype} {shape}")
    declared = _declared_scalar(target)
    if declared is not None and not np.issubdtype(np.dtype(dtype), declared):
        raise ValueError(f"an array of {dtype} stands where one of {declared.__name__} is declared")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


@lru_cache(maxsize=64)
def _declared_scalar(target: Any) -> type[np.generic] | None:
    """`np.float32` of `NDArray[np.float32]`; None where anything goes."""
    if get_origin(target) is not np.ndarray:
        return None
    (scalar,) = get_args(get_args(target)[1])
    scalar = get_origin(scalar) or scalar
    return scalar if issubclass(scalar, np.generic) else None


# --- one run of bytes ------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)


@lru_cache(maxsize=64)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, dec_hook=_from_builtin)


_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, NotImplementedError, RecursionError)
"""What bytes of any kind may cause, the last one by nesting deep enough."""


def encode(obj: object) -> bytes:
    """Raises InternalError naming the type for what cannot cross a process."""
    if isinstance(obj, ProcessLocal):
        raise InternalError(f"a {type(obj).__name__} does not leave the process that received it")
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
    except _UNREADABLE as error:
        raise InternalError(f"cannot decode {len(data)} bytes as {_name(type_)}: {error}") from error


# --- frames ----------------------------------------------------------------------------------------------------------


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The first frame."""

    kind: str
    """A name in `REGISTRY`, or "list" or "dict"."""
    body: msgspec.Raw


def encode_frames(obj: object) -> list[bytes]:
    """An object of a registered type, or a list or dict of them: the message, then its large arrays one by one.

    Raises InternalError naming the type for any other.
    """
    _refuse_unregistered(obj)
    frames = [b""]

    def to_builtin(part: object) -> object:
        if isinstance(part, np.ndarray) and part.nbytes >= OUT_OF_BAND_BYTES:
            plain = _as_plain(part)
            frames.append(plain.tobytes())
            return plain.dtype.str, plain.shape, len(frames) - 1
        return _to_builtin(part)

    try:
        body = msgspec.msgpack.encode(obj, enc_hook=to_builtin)
    except (NotImplementedError, TypeError, OverflowError, ValueError) as error:
        raise InternalError(f"cannot encode a {type(obj).__name__}: {error}") from error
    frames[0] = msgspec.msgpack.encode(_Envelope(type(obj).__name__, msgspec.Raw(body)))
    return frames


def _refuse_unregistered(obj: object) -> None:
    parts: list[object]
    if type(obj) is list:
        parts = obj
    elif type(obj) is dict:
        parts = [*obj.keys(), *obj.values()]
    elif REGISTRY.get(type(obj).__name__) is type(obj):
        parts = [obj.result] if isinstance(obj, SchedulerResult) and obj.result is not None else []
    else:
        raise InternalError(f"{type(obj).__name__} is not a type of the wire")
    for part in parts:
        _refuse_unregistered(part)


@overload
def decode_frames(frames: Sequence[bytes | memoryview], type_: type[T]) -> T: ...
@overload
def decode_frames(frames: Sequence[bytes | memoryview], type_: Any) -> Any: ...
def decode_frames(frames: Sequence[bytes | memoryview], type_: Any) -> Any:
    """What `encode_frames` made of an object of `type_`: a registered type, a list or dict of such, or a union.

    Arrays from frames of their own are views of those frames, and as writable as they are; bytes are not. Raises
    InternalError, naming the types, where another type arrived, where either is not registered, and for garbage.
    """
    admitted = _admitted(type_)
    if not frames:
        raise InternalError(f"cannot decode no frames as {_name(type_)}")
    try:
        envelope = _decoder(_Envelope).decode(frames[0])
        if envelope.kind not in admitted:
            known = "" if envelope.kind in (*REGISTRY, "list", "dict") else ", which is not a type of the wire"
            raise ValueError(f"a {envelope.kind} arrived{known}")
        return msgspec.msgpack.decode(envelope.body, type=admitted[envelope.kind], dec_hook=_frame_reader(frames))
    except _UNREADABLE as error:
        raise InternalError(f"cannot decode {len(frames)} frames as {_name(type_)}: {error}") from error


def _frame_reader(frames: Sequence[bytes | memoryview]) -> Callable[[Any, object], object]:
    def from_builtin(target: Any, value: object) -> object:
        if (get_origin(target) or target) is np.ndarray:
            dtype, shape, data = msgspec.convert(value, PackedArray)
            if isinstance(data, int):
                if not 0 < data < len(frames):
                    raise ValueError(f"an array lies in frame {data} of {len(frames)}")
                return _array(target, dtype, shape, frames[data])
        return _from_builtin(target, value)

    return from_builtin


@lru_cache(maxsize=64)
def _admitted(type_: Any) -> dict[str, Any]:
    """What `type_` lets in, by the name in the first frame."""
    origin = get_origin(type_)
    if origin in (Union, UnionType):
        return {name: member for option in get_args(type_) for name, member in _admitted(option).items()}
    if type_ is NoneType:
        return {}
    named = origin or type_
    if named not in (list, dict) and REGISTRY.get(getattr(named, "__name__", "")) is not named:
        raise InternalError(f"{_name(type_)} is not a type of the wire")
    for argument in get_args(type_):
        _admitted(argument)
    return {named.__name__: type_}


def _name(type_: Any) -> str:
    return str(type_) if get_args(type_) else str(getattr(type_, "__name__", type_))
