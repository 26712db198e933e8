"""A copy of bytes that digests what it copies: each byte is read once, and what was digested is what was written.

Knows XXH3-128 without a seed (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, the form for over 240 bytes); nothing
of blocks. Compiled by numba at first use, kept in its cache, run without the GIL. Invariant: the digest is the xxhash
library's, of any input, on any processor. Lanes are LLVM's vectors, which become what the processor has, and the
destination is written past its caches, so that it is not read from memory first.
"""

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_STRIPE: Final = 64
_BLOCK: Final = 1024
"""Bytes between two scrambles, 16 stripes."""
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_LOW_KEYS, _HIGH_KEYS = _SECRET[11:75].copy().view(np.uint64), _SECRET[117:181].copy().view(np.uint64)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3, _PRIME64_4, _PRIME64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array(
    [_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1], np.uint64
)

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(_INT64, 8)


Pair = tuple[memoryview, memoryview]
"""A destination and a source, of bytes, of the same length, which do not overlap."""


def copy_digested(destination: memoryview, source: memoryview) -> bytes:
    """The XXH3-128 of `source`, which `destination` then holds. As `copy_all_digested`, of one pair."""
    (digest,) = copy_all_digested([(destination, source)])
    return digest


def copy_all_digested(pairs: Sequence[Pair]) -> list[bytes]:
    """The XXH3-128 of each source, which its destination then holds; all of them without the GIL in one go."""
    for destination, source in pairs:
        if len(source) != len(destination):
            raise ValueError(f"{len(source)} bytes do not go into {len(destination)}")
    if all(len(source) >= _BLOCK and len(source) % _STRIPE == 0 for _, source in pairs):
        places = np.array([(_address(there), _address(here), len(there)) for there, here in pairs], np.uint64)
        places = places.reshape(-1, 3)
        if not (places[:, 0] % _STRIPE).any():
            digests = np.empty((len(pairs), 2), np.uint64)
            _copy_all_digested(places, digests)
            return [digest.tobytes() for digest in digests.astype(">u8")]
    return [_copy_and_digest(*pair) for pair in pairs]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _copy_and_digest(destination: memoryview, source: memoryview) -> bytes:
    destination[:] = source
    return bytes(xxhash.xxh3_128_digest(destination))


def prepare() -> None:
    """Compile, where no cache has it: a second that no stream should wait for."""
    pages = memoryview(mmap.mmap(-1, 2 * _BLOCK))  # which are aligned
    copy_digested(pages[:_BLOCK], pages[_BLOCK:])


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _spread(value: int) -> ir.Constant:
    return ir.Constant(_LANES, [value] * 8)


class _Copier:
    """Code that copies and digests one stripe after another."""

    def __init__(self, builder: Any, there: Any, here: Any, secret: Any, sums: Any) -> None:
        self._builder, self._there, self._here, self._secret = builder, there, here, secret
        self._sums = cgutils.alloca_once_value(builder, self._load(sums, _constant(0)))
        self._past_caches = builder.module.add_metadata([ir.Constant(_INT32, 1)])

    def _load(self, place: Any, offset: Any) -> Any:
        at = self._builder.inttoptr(self._builder.add(place, offset), _LANES.as_pointer())
        return self._builder.load(at, align=1)

    def stripe(self, at: Any, key_at: Any) -> None:
        builder = self._builder
        data = self._load(self._here, at)
        to = builder.inttoptr(builder.add(self._there, at), _LANES.as_pointer())
        builder.store(data, to, align=_STRIPE).set_metadata("nontemporal", self._past_caches)
        keyed = builder.xor(data, self._load(self._secret, key_at))
        product = builder.mul(builder.and_(keyed, _spread(0xFFFFFFFF)), builder.lshr(keyed, _spread(32)))
        neighbours = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(_INT32, 8), [1, 0, 3, 2, 5, 4, 7, 6]))
        builder.store(builder.add(builder.load(self._sums), builder.add(neighbours, product)), self._sums)

    def scramble(self) -> None:
        builder = self._builder
        sums = builder.load(self._sums)
        sums = builder.xor(sums, builder.lshr(sums, _spread(47)))
        sums = builder.xor(sums, self._load(self._secret, _constant(128)))
        builder.store(builder.mul(sums, _spread(_PRIME32_1)), self._sums)

    def finish(self, sums: Any) -> None:
        builder = self._builder
        builder.store(builder.load(self._sums), builder.inttoptr(sums, _LANES.as_pointer()), align=8)
        builder.fence("seq_cst")  # whoever is told of the copy sees it


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _copy_stripes(typingctx: Any, there: Any, here: Any, size: Any, secret: Any, sums: Any) -> Any:
    """Copy `size` bytes, a positive multiple of 64, between addresses; take them into the eight sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        there, here, size, secret, sums = arguments
        copier = _Copier(builder, there, here, secret, sums)
        last = builder.sub(size, _constant(_STRIPE))
        blocks = builder.udiv(builder.sub(size, _constant(1)), _constant(_BLOCK))
        with cgutils.for_range(builder, blocks) as loop:
            at = builder.mul(loop.index, _constant(_BLOCK))
            for stripe in range(_BLOCK // _STRIPE):
                copier.stripe(builder.add(at, _constant(stripe * _STRIPE)), _constant(8 * stripe))
            copier.scramble()
        whole = builder.mul(blocks, _constant(_BLOCK))
        with cgutils.for_range(builder, builder.udiv(builder.sub(last, whole), _constant(_STRIPE))) as loop:
            at = builder.add(whole, builder.mul(loop.index, _constant(_STRIPE)))
            copier.stripe(at, builder.mul(loop.index, _constant(8)))
        copier.stripe(last, _constant(121))
        copier.finish(sums)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.uint64, types.uint64), generate


def _compiled(function: Any) -> Any:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in can be written
        return numba.njit(nogil=True)(function)


@_compiled
def _folded(a: Any, b: Any) -> Any:
    """The upper half of the product of two words of 64 bits, xor its lower half."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high = (a & mask) * (b & mask), (a >> half) * (b >> half)
    cross = (a >> half) * (b & mask)
    middle = (low >> half) + (cross & mask) + (a & mask) * (b >> half)
    return (high + (cross >> half) + (middle >> half)) ^ ((middle << half) | (low & mask))


@_compiled
def _merged(sums: Any, keys: Any, start: Any) -> Any:
    result = start
    for pair in range(0, 8, 2):
        result += _folded(sums[pair] ^ keys[pair], sums[pair + 1] ^ keys[pair + 1])
    result = (result ^ (result >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return result ^ (result >> np.uint64(32))


@_compiled
def _copy_all_digested(places: Any, digests: Any) -> Any:
    """`places`, [n, 3]: destination, aligned as the copy needs it, source and bytes; `digests`, [n, 2]: the upper and
    the lower half of each digest."""
    for index in range(len(places)):
        there, here, size = places[index]
        sums = _START.copy()
        _copy_stripes(there, here, size, _SECRET.ctypes.data, sums.ctypes.data)
        digests[index, 0] = _merged(sums, _HIGH_KEYS, ~(size * _PRIME64_2))
        digests[index, 1] = _merged(sums, _LOW_KEYS, size * _PRIME64_1)
