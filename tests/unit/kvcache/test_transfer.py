import tracemalloc

import pytest

from kvcache import digested_copy
from kvcache.transfer import (
    BlockReceiver,
    BlocksFrame,
    CommitFrame,
    MessageFrame,
    decode,
    encode_blocks,
    encode_commit,
    encode_message,
)
from pronghorn.errors import TransferFailed

SIZE = 100


def block(position):
    return memoryview(bytes((position * 7 + i) % 251 for i in range(SIZE)))


def sent_frames(positions, target=1 << 20):
    sent = {}
    return [*encode_blocks([(p, block(p)) for p in positions], sent, target), encode_commit(sent)]


def receiver(positions):
    return BlockReceiver({p: memoryview(bytearray(SIZE)) for p in positions})


def deliver(frames, into):
    for data in frames:
        match decode(data):
            case BlocksFrame() as frame:
                into.accept(frame)
            case CommitFrame() as frame:
                into.commit(frame)


def refused(code):
    return pytest.raises(TransferFailed, check=lambda error: error.code == code)


@pytest.mark.field("sglang#5450")
@pytest.mark.conformance(42)
@pytest.mark.parametrize(("target", "frames"), [(1 << 20, 1), (250, 2), (100, 4), (99, 8), (30, 16)])
def test_blocks_share_frames_or_are_split_and_arrive_whole(target, frames):
    positions = [4, 1, 9, 2]
    made = sent_frames(positions, target)
    assert len(made) == frames + 1
    assert max(len(piece.data) for f in made[:-1] for piece in decode(f).pieces) <= target
    into = receiver(positions)
    deliver(made, into)
    assert into.committed and into.received_bytes == 4 * SIZE
    assert all(into.wanted[p] == block(p) for p in positions)


def test_frames_of_several_chunks_are_one_hand_over():
    sent = {}
    into = receiver([0, 1, 2])
    done = [into.accept(decode(f)) for f in encode_blocks([(0, block(0)), (1, block(1))], sent)]
    done += [into.accept(decode(f)) for f in encode_blocks([(2, block(2))], sent)]
    into.commit(decode(encode_commit(sent)))
    assert done == [[0, 1], [2]] and into.committed


def test_nothing_wanted_is_a_hand_over_too():
    into = receiver([])
    deliver(sent_frames([]), into)
    assert into.committed


def test_a_message_goes_through_untouched():
    frame = decode(encode_message(b"first token"))
    assert isinstance(frame, MessageFrame) and bytes(frame.payload) == b"first token"


def test_a_position_is_sent_once():
    sent = {}
    list(encode_blocks([(3, block(3))], sent))
    with pytest.raises(ValueError, match="position 3 was sent already"):
        list(encode_blocks([(3, block(3))], sent))


@pytest.mark.parametrize(
    "garbage",
    [b"", b"P", b"XX\x01\x01", b"PT\x02\x01", b"PT\x01\x09abc", b"PT\x01\x02", b"PT\x01\x02\x00\x00\x00\x00"],
)
def test_garbage_is_refused(garbage):
    with refused("bad_frame"):
        decode(garbage)


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: f + b"x", lambda f: f[:4] + b"\xff" * 4 + f[8:]])
def test_a_frame_of_another_length_than_it_says_is_refused(change):
    with refused("bad_frame"):
        decode(change(sent_frames([1])[0]))


@pytest.mark.conformance(42)
def test_a_flipped_bit_is_a_wrong_digest():
    frame = bytearray(sent_frames([1])[0])
    frame[-1] ^= 1
    with refused("wrong_digest"):
        receiver([1]).accept(decode(bytes(frame)))


def test_a_block_that_was_not_asked_for_is_refused():
    with refused("wrong_position"):
        deliver(sent_frames([1]), receiver([2]))


def test_a_block_of_another_size_is_refused():
    with refused("wrong_size"):
        BlockReceiver({1: memoryview(bytearray(SIZE + 1))}).accept(decode(sent_frames([1])[0]))


def test_a_block_that_comes_twice_is_refused():
    frame = sent_frames([1])[0]
    into = receiver([1, 2])
    into.accept(decode(frame))
    with refused("duplicate_block"):
        into.accept(decode(frame))


def test_a_frame_that_was_taken_holds_its_memory_no_more():
    memory = bytearray(sent_frames([1, 2])[0])
    frame = decode(memory)
    assert receiver([1, 2]).accept(frame) == [1, 2]
    memory.clear()  # BufferError while anything still looks at it


def test_pieces_out_of_order_are_refused():
    first, second, third, *_ = sent_frames([1], 40)
    into = receiver([1])
    into.accept(decode(first))
    with refused("torn_block"):
        into.accept(decode(third))


def test_pieces_of_two_versions_of_a_block_are_refused():
    changed = list(encode_blocks([(1, block(5))], {}, 60))
    into = receiver([1])
    into.accept(decode(sent_frames([1], 60)[0]))
    with refused("torn_block"):
        into.accept(decode(changed[1]))


@pytest.mark.conformance(42)
def test_a_commit_before_the_last_block_is_refused():
    frames = sent_frames([1, 2], 100)
    into = receiver([1, 2])
    into.accept(decode(frames[0]))
    with refused("incomplete"):
        into.commit(decode(frames[-1]))


def test_a_commit_of_other_blocks_is_refused():
    into = receiver([1, 2])
    into.accept(decode(sent_frames([1, 2])[0]))
    for sent in ({1: b"x" * 16, 2: b"y" * 16}, {1: b"x" * 16}):
        with refused("wrong_commit"):
            BlockReceiver.commit(replayed(), decode(encode_commit(sent)))


def replayed():
    into = receiver([1, 2])
    into.accept(decode(sent_frames([1, 2])[0]))
    return into


def test_swapped_positions_do_not_commit():
    """Each block is whole and verified, but under the other's name."""
    sent = {}
    swapped = [*encode_blocks([(1, block(2)), (2, block(1))], {})]
    list(encode_blocks([(1, block(1)), (2, block(2))], sent))
    with refused("wrong_commit"):
        deliver([*swapped, encode_commit(sent)], receiver([1, 2]))


def test_a_refusal_is_final():
    frames = sent_frames([1, 2], 100)
    into = receiver([1, 2])
    into.accept(decode(frames[0]))
    with refused("duplicate_block"):
        into.accept(decode(frames[0]))
    with refused("ended"):
        into.accept(decode(frames[1]))
    with refused("ended"):
        into.commit(decode(frames[2]))
    assert not into.committed


def test_nothing_is_taken_after_the_commit():
    frames = sent_frames([1])
    into = receiver([1])
    deliver(frames, into)
    for late in frames:
        with refused("ended"):
            deliver([late], into)


def test_a_sender_with_fewer_blocks_commits_what_it_sent():
    into = receiver([0, 1, 2, 3])
    *blocks, commit = sent_frames([0, 1])
    for data in blocks:
        into.accept(decode(data))
    assert into.leading == 2
    into.commit_what_came(decode(commit))
    assert into.committed and into.leading == 2


def test_a_commit_of_other_blocks_than_came_is_refused():
    into = receiver([0, 1, 2])
    first, _ = sent_frames([0])
    into.accept(decode(first))
    *_, commit = sent_frames([0, 1])
    with refused("wrong_commit"):
        into.commit_what_came(decode(commit))


def test_a_gap_ends_what_leads():
    into = receiver([0, 1, 2])
    for data in sent_frames([0, 2])[:-1]:
        into.accept(decode(data))
    assert into.leading == 1


@pytest.mark.field("tensorflow#6256", "sglang#5450")
@pytest.mark.parametrize("block_kib", [4, 64, 720, 2048])
def test_a_byte_is_copied_once_into_a_frame_and_once_out_of_it(block_kib: int) -> None:
    """By what is allocated meanwhile: the frames and nothing else, then nothing at all."""
    digested_copy.prepare()
    count, size, little = max(2, 4096 // block_kib), block_kib << 10, 256 << 10
    pool = bytearray(i % 251 for i in range(size)) * count
    blocks = [(p, memoryview(pool)[p * size : (p + 1) * size]) for p in range(count)]
    into = BlockReceiver({p: memoryview(bytearray(size)) for p in range(count)})
    sent: dict[int, bytes] = {}
    tracemalloc.start()
    try:
        frames = list(encode_blocks(blocks, sent))
        _, encoding_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before_bytes, _ = tracemalloc.get_traced_memory()
        for data in frames:
            frame = decode(data)
            assert isinstance(frame, BlocksFrame) and all(piece.data.obj is data for piece in frame.pieces)
            into.accept(frame)
        _, at_most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pool) <= encoding_bytes <= len(pool) + little
    assert at_most_bytes - before_bytes <= little
    deliver([encode_commit(sent)], into)
    assert into.committed and all(into.wanted[p] == block for p, block in blocks)
