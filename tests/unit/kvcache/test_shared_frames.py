import os

import pytest

from kvcache import transfer
from kvcache.memory import ForeignMemory
from kvcache.transfer import BlockReceiver, Carriage, decode, decode_shared, encode_shared, is_shared
from pronghorn.errors import TransferFailed

SIZE = 4096


def frames(memory, *blocks, target=1 << 20):
    sent = {}
    return list(encode_shared(((b, memory.block(b)) for b in blocks), sent, memory.place, target)), sent


def test_a_shared_frame_says_where_the_blocks_lie_and_carries_none(memory):
    made, sent = frames(memory, 2, 0, 3)
    assert len(made) == 1 and is_shared(made[0]) and len(made[0]) < 200
    received = BlockReceiver({b: memoryview(bytearray(SIZE)) for b in (0, 2, 3)})
    assert received.accept(decode_shared(made[0], memory.block(0).obj and memoryview(memory.buffer))) == [2, 0, 3]
    received.commit(decode(transfer.encode_commit(sent)))
    assert all(received.wanted[b] == memory.block(b) for b in (0, 2, 3))


@pytest.mark.parametrize(("target", "count"), [(SIZE, 3), (SIZE + 1, 2), (3 * SIZE, 1)])
def test_blocks_share_frames_up_to_the_bound(memory, target, count):
    assert len(frames(memory, 0, 1, 2, target=target)[0]) == count


def test_a_position_is_sent_once(memory):
    sent = {}
    list(encode_shared([(1, memory.block(1))], sent, memory.place))
    with pytest.raises(ValueError, match="position 1 was sent already"):
        list(encode_shared([(1, memory.block(1))], sent, memory.place))


def test_a_block_that_was_written_after_it_was_named_is_refused(memory):
    made, _ = frames(memory, 1)
    memory.block(1)[7:8] = b"x"
    received = BlockReceiver({1: memoryview(bytearray(SIZE))})
    with pytest.raises(TransferFailed, check=lambda error: error.code == "wrong_digest"):
        received.accept(decode_shared(made[0], memoryview(memory.buffer)))


@pytest.mark.parametrize("frame", ["outside", "torn", "empty", "of bytes"])
def test_what_is_no_shared_frame_is_refused(memory, frame):
    (good,), _ = frames(memory, 3)
    data, view = {
        "outside": (good, memoryview(memory.buffer)[: 3 * SIZE]),
        "torn": (good[:-1], memoryview(memory.buffer)),
        "empty": (good[:4], memoryview(memory.buffer)),
        "of bytes": (next(transfer.encode_blocks([(0, memory.block(0))], {})), memoryview(memory.buffer)),
    }[frame]
    with pytest.raises(TransferFailed, check=lambda error: error.code == "bad_frame"):
        decode_shared(data, view)


def test_a_shared_frame_means_nothing_where_no_memory_is_shared(memory):
    (frame,), _ = frames(memory, 0)
    with pytest.raises(TransferFailed, check=lambda error: error.code == "bad_frame"):
        decode(frame)


def test_another_process_can_read_the_memory_and_not_write_or_shrink_it(memory):
    foreign = ForeignMemory(memory.readable_fd())
    assert foreign.view[SIZE : 2 * SIZE] == memory.block(1)
    assert foreign.view.readonly
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, SIZE)
    foreign.close()


def test_memory_that_may_shrink_under_its_reader_is_refused():
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, SIZE)
    with pytest.raises((ValueError, OSError)):
        ForeignMemory(fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_carriage_says_how_many_blocks_go_into_a_frame():
    carriage = Carriage(transfer.encode_blocks, 1 << 20)
    assert [carriage.blocks_per_frame(size << 10) for size in (1, 360, 720, 800, 1024, 4096)] == [1024, 3, 2, 1, 1, 1]
