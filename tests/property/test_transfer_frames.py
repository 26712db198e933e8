"""Whatever happens to the frames of a hand-over on their way, a block that is not the sender's is never adopted."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.transfer import BlockReceiver, BlocksFrame, CommitFrame, MessageFrame, decode, encode_blocks, encode_commit
from pronghorn.errors import TransferFailed

SIZES = st.integers(1, 80)
POSITIONS = st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=5)


@st.composite
def hand_overs(draw):
    """Blocks by position, and the frames that carry them, cut in chunks and frames anyhow."""
    size = draw(SIZES)
    blocks = {position: draw(st.binary(min_size=size, max_size=size)) for position in draw(POSITIONS)}
    sent: dict[int, bytes] = {}
    frames = []
    rest = list(blocks.items())
    while rest:
        cut = draw(st.integers(1, len(rest)))
        chunk = [(position, memoryview(data)) for position, data in rest[:cut]]
        frames += encode_blocks(chunk, sent, draw(st.integers(1, 200)))
        rest = rest[cut:]
    return blocks, [*frames, encode_commit(sent)]


@st.composite
def damages(draw, frames):
    """The frames after dropping, doubling, swapping, flipping, cutting and forging some of them."""
    frames = list(frames)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frames) - 1)))
        frame = frames[at] if frames else b""
        match draw(st.sampled_from(["drop", "double", "swap", "flip", "cut", "forge", "splice"])):
            case "drop":
                del frames[at : at + 1]
            case "double":
                frames.insert(at, frame)
            case "swap" if frames:
                other = draw(st.integers(0, len(frames) - 1))
                frames[at], frames[other] = frames[other], frame
            case "flip" if frame:
                bit = draw(st.integers(0, 8 * len(frame) - 1))
                changed = bytearray(frame)
                changed[bit // 8] ^= 1 << bit % 8
                frames[at] = bytes(changed)
            case "cut" if frame:
                frames[at : at + 1] = [frame[: draw(st.integers(0, len(frame)))]]
            case "splice" if len(frames) > 1:
                frames[at : at + 2] = [frame + frames[(at + 1) % len(frames)]]
            case "forge":
                frames.insert(at, draw(st.binary(max_size=60)))
    return frames


def deliver(frames, into):
    for data in frames:
        match decode(data):
            case BlocksFrame() as frame:
                into.accept(frame)
            case CommitFrame() as frame:
                into.commit(frame)
            case MessageFrame():
                pass


def receiver(blocks):
    return BlockReceiver({position: memoryview(bytearray(len(data))) for position, data in blocks.items()})


@given(hand_overs())
@settings(max_examples=150, deadline=None)
def test_an_undamaged_hand_over_arrives(hand_over):
    blocks, frames = hand_over
    into = receiver(blocks)
    deliver(frames, into)
    assert into.committed
    assert {position: bytes(memory) for position, memory in into.wanted.items()} == blocks


@given(hand_overs(), st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_hand_over_is_refused_or_arrives_whole(hand_over, data):
    blocks, frames = hand_over
    into = receiver(blocks)
    with suppress(TransferFailed):
        deliver(data.draw(damages(frames)), into)
    if into.committed:
        assert {position: bytes(memory) for position, memory in into.wanted.items()} == blocks


@given(hand_overs(), hand_overs())
@settings(max_examples=150, deadline=None)
def test_another_senders_hand_over_is_refused_or_is_its_own_and_whole(mine, theirs):
    """A stale or foreign stream may be well made: it commits only where it is of the blocks asked for, as sent."""
    into = receiver(mine[0])
    with suppress(TransferFailed):
        deliver(theirs[1], into)
    if into.committed:
        assert {position: bytes(memory) for position, memory in into.wanted.items()} == theirs[0]


@given(hand_overs(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_blocks_under_each_others_names_are_refused(hand_over, random):
    """Each is whole and has its own digest; only the commit knows which belongs where."""
    blocks, frames = hand_over
    shuffled = random.sample(list(blocks.values()), len(blocks))
    renamed = [(position, memoryview(data)) for position, data in zip(blocks, shuffled, strict=True)]
    into = receiver(blocks)
    with suppress(TransferFailed):
        deliver([*encode_blocks(renamed, {}), frames[-1]], into)
    assert into.committed == (shuffled == list(blocks.values()))


@given(st.binary(max_size=200) | st.binary(max_size=80).map(lambda body: b"PT\x01\x02" + body))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_frame_or_a_typed_refusal(data):
    with suppress(TransferFailed):
        decode(data)
