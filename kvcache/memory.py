"""The bytes of every block of a pool: one shared mapping that a node and its engine both see.

Knows a file descriptor, sizes, how often each block was given away, and what its digest was said to be; not what lies
in a block, nor who may touch it. The whole size is allocated when the memory is made, so that too little memory is a
clear error at start, not a SIGBUS under load. Behind the blocks lies a number for each: its life, which the engine's
pool counts up (`begin_life`) before anything else is written there. Whoever reads one life twice, both times under a
hold, has read the same bytes. Behind the lives lie digests, each with the life that it is of.
"""

import ctypes
import fcntl
import mmap
import os
import tempfile

from kvcache.available_memory import available_bytes
from pronghorn.errors import ConfigurationError

_ZEROS = bytes(1 << 20)
_LIFE_BYTES = 8
DIGEST_BYTES = 16
_BEHIND_BYTES = 2 * _LIFE_BYTES + DIGEST_BYTES
"""Of each block: its life, the life that the digest is of, and the digest."""


class BlockMemory:
    """`num_blocks` spans of `block_bytes` bytes. Made by `create` in one process, `attach`ed in the other.

    Owns its descriptor. A child gets it by `pass_fds=[memory.fd]`.
    """

    def __init__(self, fd: int, num_blocks: int, block_bytes: int) -> None:
        """For `create` and `attach` only."""
        self.fd = fd
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.buffer = mmap.mmap(fd, _size(num_blocks, block_bytes))
        self._view = memoryview(self.buffer)
        behind = self._view[-num_blocks * _BEHIND_BYTES :]
        lives = behind[: 2 * num_blocks * _LIFE_BYTES].cast("Q")
        self._lives, self._digested_lives = lives[:num_blocks], lives[num_blocks:]
        self._digests = behind[2 * num_blocks * _LIFE_BYTES :]
        self._start = _address(self._view)
        self._closed = False

    @classmethod
    def create(cls, num_blocks: int, block_bytes: int) -> "BlockMemory":
        """New zeroed memory. ConfigurationError, naming what is asked and what is there, where it does not fit."""
        _check_sizes(num_blocks, block_bytes)
        asked = _size(num_blocks, block_bytes)
        there = available_bytes()
        if there is not None and asked > there:
            raise _too_little(num_blocks, block_bytes, there)
        fd = _anonymous_file()
        try:
            _allocate(fd, asked)
            _seal(fd)
            return cls(fd, num_blocks, block_bytes)
        except OSError as error:
            os.close(fd)
            raise _too_little(num_blocks, block_bytes, there) from error

    @classmethod
    def attach(cls, fd: int, num_blocks: int, block_bytes: int) -> "BlockMemory":
        """The memory behind `fd`, which now belongs to the result. ConfigurationError where its size is another."""
        _check_sizes(num_blocks, block_bytes)
        size = os.fstat(fd).st_size
        if size != _size(num_blocks, block_bytes):
            raise ConfigurationError(
                f"the block memory holds {size} bytes, but {num_blocks} blocks of {block_bytes} bytes were announced"
            )
        return cls(fd, num_blocks, block_bytes)

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block, writable. Valid until `close`; ValueError on an id outside the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is outside the pool of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def place(self, view: memoryview) -> int:
        """Where `view`, a view into this memory, begins: bytes from the memory's first."""
        return _address(view) - self._start

    def begin_life(self, block_id: int) -> None:
        """Other bytes will be written into this block. Only the process that gives blocks away calls it."""
        self._lives[block_id] += 1

    def life(self, block_id: int) -> int:
        """Which life of the block this is; the same in every process that sees the memory."""
        return self._lives[block_id]

    def note_digest(self, block_id: int, digest: bytes) -> None:
        """What the bytes of this block come to, in DIGEST_BYTES bytes. They stay as they are as long as it lives."""
        self._digests[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES] = digest
        self._digested_lives[block_id] = self._lives[block_id] + 1  # 0 says that there is none

    def digest(self, block_id: int) -> bytes | None:
        """As it was noted in this life of the block, by whichever process; None where it was not."""
        if self._digested_lives[block_id] != self._lives[block_id] + 1:
            return None
        return bytes(self._digests[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES])

    def readable_fd(self) -> int:
        """A new descriptor of this memory that can be mapped, and not written; the caller's to close. Linux only."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def copy(self, source: int, destination: int) -> None:
        """Make block `destination` hold the bytes of block `source`."""
        self.block(destination)[:] = self.block(source)

    def close(self) -> None:
        """Give up the descriptor and the mapping. Idempotent. While somebody still holds a view (a tensor, a block),
        the mapping itself stays until the last of them is gone: a view never points at nothing."""
        if self._closed:
            return
        self._closed = True
        for view in (self._lives, self._digested_lives, self._digests, self._view):
            view.release()
        os.close(self.fd)
        try:
            self.buffer.close()
        except BufferError:  # views are out; the garbage collector unmaps it after the last one
            pass


class ForeignMemory:
    """Another process's block memory, to be read: a mapping of the descriptor that it gave."""

    def __init__(self, fd: int) -> None:
        """Takes `fd` over. OSError or ValueError where it cannot be mapped, or might shrink under who reads it."""
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the memory is not sealed against shrinking")
            self._mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        """As `BlockMemory.close`: a view that is still held keeps the mapping."""
        self.view.release()
        try:
            self._mapping.close()
        except BufferError:  # unmapped with the last view
            pass


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _size(num_blocks: int, block_bytes: int) -> int:
    """Blocks, and what is said of each on a place of its own width."""
    blocks = num_blocks * block_bytes
    return blocks + -blocks % _LIFE_BYTES + num_blocks * _BEHIND_BYTES


def _check_sizes(num_blocks: int, block_bytes: int) -> None:
    if num_blocks < 1 or block_bytes < 1:
        raise ValueError(f"a pool has at least 1 block of 1 byte, not {num_blocks} of {block_bytes}")


def _too_little(num_blocks: int, block_bytes: int, there: int | None) -> ConfigurationError:
    asked = num_blocks * block_bytes
    known = "an unknown amount" if there is None else f"{there / 2**20:.0f} MiB"
    return ConfigurationError(
        f"too little memory for the KV pool: {num_blocks} blocks of {block_bytes} bytes ask for "
        f"{asked / 2**20:.0f} MiB, and {known} is available; ask for fewer blocks",
        param="num_blocks",
    )


def _anonymous_file() -> int:
    """A file without a name: gone with its last descriptor and mapping, however the processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pronghorn-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal(fd: int) -> None:
    """Its size stays what it is: who maps it never meets a SIGBUS."""
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _allocate(fd: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return
    for start in range(0, size_bytes, len(_ZEROS)):  # no fallocate there: writing is what allocates
        os.write(fd, _ZEROS[: size_bytes - start])
