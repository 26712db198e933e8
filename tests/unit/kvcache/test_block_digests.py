import os

import numpy as np
import pytest

from kvcache import transfer
from kvcache.block_digests import BlockDigests
from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from kvcache.transfer import BlockReceiver, block_digest, decode, decode_shared, encode_blocks, encode_shared
from pronghorn.errors import TransferFailed

SIZE = 4096


@pytest.fixture
def digested(monkeypatch):
    """How often a block was read to be digested."""
    digested = []
    monkeypatch.setattr(
        "kvcache.block_digests.block_digest", lambda block: (digested.append(bytes(block[:1])), block_digest(block))[1]
    )
    return digested


def in_frames(memory, digests, block):
    return decode(next(encode_blocks([(0, memory.block(block))], {}, digest_of=digests.digest)))


def shared(memory, digests, block):
    (frame,) = encode_shared([(0, memory.block(block))], {}, memory.place, digest_of=digests.digest)
    return decode_shared(frame, memoryview(memory.buffer))


WAYS = pytest.mark.parametrize("encode", [in_frames, shared])


def receive(frame):
    destination = bytearray(SIZE)
    assert BlockReceiver({0: memoryview(destination)}).accept(frame) == [0]
    return bytes(destination)


@WAYS
def test_a_block_is_digested_when_it_first_leaves_and_not_again(memory, digested, encode):
    digests = BlockDigests(memory)
    for _ in range(3):
        for block in (2, 0):
            assert receive(encode(memory, digests, block)) == memory.block(block)
    assert digested == [b"\x03", b"\x01"]


@WAYS
def test_in_its_next_life_it_is_digested_anew(memory, digested, encode):
    digests = BlockDigests(memory)
    encode(memory, digests, 1)
    memory.begin_life(1)
    memory.block(1)[:] = b"n" * SIZE
    assert receive(encode(memory, digests, 1)) == b"n" * SIZE
    assert digested == [b"\x02", b"n"]


@WAYS
def test_a_bit_that_flips_where_the_block_lies_is_found_by_the_next_receiver(memory, encode):
    digests = BlockDigests(memory)
    receive(encode(memory, digests, 3))
    memory.block(3)[1000] ^= 1
    with pytest.raises(TransferFailed, check=lambda error: error.code == "wrong_digest"):
        receive(encode(memory, digests, 3))


@pytest.mark.field("vllm#55470")
def test_a_block_that_was_given_to_another_prompt_meanwhile_reaches_nobody(memory):
    digests = BlockDigests(memory)
    receive(shared(memory, digests, 1))
    named = shared(memory, digests, 1)
    memory.begin_life(1)
    memory.block(1)[:] = b"n" * SIZE
    with pytest.raises(TransferFailed, check=lambda error: error.code == "wrong_digest"):
        receive(named)


def test_a_part_of_a_block_has_a_digest_of_its_own(memory):
    digests = BlockDigests(memory)
    whole = digests.digest(memory.block(0))
    assert digests.digest(memory.block(0)[:100]) == block_digest(memory.block(0)[:100]) != whole
    assert digests.digest(memory.block(0)) == whole


def test_every_process_knows_the_digest_of_a_sealed_block_and_nobody_makes_it_again(memory, digested):
    assert [memory.digest(block) for block in range(4)] == [None] * 4
    digest = BlockDigests(memory).seal(2)
    other = BlockMemory.attach(os.dup(memory.fd), 4, SIZE)
    assert BlockDigests(other).digest(other.block(2)) == digest == block_digest(memory.block(2))
    assert digested == [b"\x03"]
    assert [other.digest(block) for block in range(4)] == [None, None, digest, None]
    other.close()


def test_a_bit_that_flips_after_a_block_was_computed_is_found_by_its_first_receiver(memory):
    digests = BlockDigests(memory)
    digests.seal(3)
    memory.block(3)[1000] ^= 1
    with pytest.raises(TransferFailed, check=lambda error: error.code == "wrong_digest"):
        receive(shared(memory, digests, 3))


def test_a_pool_begins_a_life_with_each_block_that_it_gives_away_and_with_no_other(memory):
    cache = PrefixCache(
        4, BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": "16"}), begin_life=memory.begin_life
    )
    cache.claim("a", b"root")
    cache.reserve("a", 3 * 16)
    lives = [memory.life(block) for block in range(4)]
    assert sorted(lives) == [0, 1, 1, 1]
    cache.reserve("a", 3 * 16)
    assert [memory.life(block) for block in range(4)] == lives


def test_a_carriage_of_frames_takes_its_digests_from_where_it_is_told(memory):
    carriage = transfer.in_frames(lambda block: b"d" * 16)
    sent = {}
    assert len(list(carriage.encode([(7, memory.block(0))], sent))) == 1
    assert sent == {7: b"d" * 16} and carriage.blocks_per_frame(SIZE) == transfer.IN_FRAMES.blocks_per_frame(SIZE)


def test_a_cache_seals_what_was_computed_here_once_it_is_full_and_nothing_that_came(memory):
    sealed = []
    hasher = BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": "16"})
    cache = PrefixCache(4, hasher, seal=sealed.append)
    tokens = np.arange(64)
    cache.claim("a", b"root")
    cache.reserve("a", 64)
    first, second, third, fourth = cache.table("a")
    cache.commit("a", tokens[:20], 20, computed_here=False)
    assert sealed == []
    cache.commit("a", tokens[:47], 47)
    assert sealed == [second]
    cache.commit("a", tokens, 64)
    assert sealed == [second, third, fourth]
