import os

import pytest

from kvcache import memory as memory_module
from kvcache.memory import BlockMemory
from pronghorn.errors import ConfigurationError


@pytest.fixture
def memory():
    made = BlockMemory.create(4, 64)
    yield made
    made.close()


def test_new_memory_is_zero_and_blocks_do_not_overlap(memory):
    memory.block(1)[:] = b"\x01" * 64
    assert bytes(memory.block(0)) == bytes(memory.block(2)) == bytes(64)
    assert bytes(memory.buffer[64:128]) == b"\x01" * 64


def test_what_one_process_writes_the_other_reads(memory):
    other = BlockMemory.attach(os.dup(memory.fd), 4, 64)
    memory.block(3)[5] = 7
    assert other.block(3)[5] == 7
    other.close()
    memory.block(3)[5] = 8


def test_a_copy_is_of_one_whole_block(memory):
    memory.block(1)[:] = bytes(range(64))
    memory.copy(1, 3)
    assert bytes(memory.block(3)) == bytes(range(64)) and bytes(memory.block(2)) == bytes(64)


@pytest.mark.parametrize("block_bytes", [64, 61, 1 << 16])
def test_each_block_has_a_life_of_its_own_which_every_process_sees_and_no_block_touches(block_bytes):
    memory = BlockMemory.create(3, block_bytes)
    other = BlockMemory.attach(os.dup(memory.fd), 3, block_bytes)
    for block in range(3):
        memory.block(block)[:] = b"\xff" * block_bytes
    assert [other.life(block) for block in range(3)] == [0, 0, 0]
    memory.begin_life(1)
    memory.begin_life(1)
    memory.begin_life(2)
    assert [other.life(block) for block in range(3)] == [0, 2, 1]
    memory.note_digest(2, bytes(range(16)))
    assert [other.digest(block) for block in range(3)] == [None, None, bytes(range(16))]
    other.begin_life(2)
    assert memory.digest(2) is None
    assert all(bytes(other.block(block)) == b"\xff" * block_bytes for block in range(3))
    other.close()
    memory.close()


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_block_outside_the_pool_is_refused(memory, block_id):
    with pytest.raises(ValueError, match=f"block {block_id} is outside the pool of 4"):
        memory.block(block_id)


def test_attaching_with_other_sizes_is_refused(memory):
    with pytest.raises(ConfigurationError, match="384 bytes.*5 blocks of 64"):
        BlockMemory.attach(memory.fd, 5, 64)


def test_the_whole_size_is_allocated_at_creation():
    memory = BlockMemory.create(3, 1 << 16)
    assert os.fstat(memory.fd).st_blocks * 512 >= 3 << 16
    memory.close()


def test_too_little_memory_says_how_much_is_asked_and_there(monkeypatch):
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 3 << 20)
    with pytest.raises(ConfigurationError, match="8 blocks of 1048576 bytes ask for 8 MiB, and 3 MiB is available"):
        BlockMemory.create(8, 1 << 20)


def test_a_refused_allocation_is_the_same_error_and_leaves_no_descriptor(monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(memory_module.os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match="too little memory"):
        BlockMemory.create(1, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_system_without_memfd_gets_an_unlinked_file(monkeypatch):
    monkeypatch.delattr(memory_module.os, "memfd_create", raising=False)
    monkeypatch.delattr(memory_module.os, "posix_fallocate", raising=False)
    memory = BlockMemory.create(3, 1 << 20)
    memory.block(2)[:4] = b"live"
    assert os.fstat(memory.fd).st_nlink == 0 and os.fstat(memory.fd).st_size == (3 << 20) + 3 * 32
    memory.close()


def test_close_is_idempotent_and_views_outlive_it():
    memory = BlockMemory.create(2, 64)
    view = memory.block(1)
    view[0] = 9
    memory.close()
    memory.close()
    assert view[0] == 9


def test_sizes_are_at_least_one():
    with pytest.raises(ValueError, match="not 0 of 64"):
        BlockMemory.create(0, 64)
