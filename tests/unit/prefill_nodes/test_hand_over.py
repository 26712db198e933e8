import pytest

from pipelines.runtime.messages import ChunkReady
from pipelines.types.handover import FirstToken
from prefill_nodes.hand_over import TRANSITIONS, Blocks, Commit, HandOver, HandOverState
from pronghorn.errors import Overloaded
from pronghorn.ids import Fence, Incarnation, RequestID

FENCE = Fence(RequestID("r"), 1, Incarnation("d" * 32))
FULL = Overloaded("full").record()


def chunk(*pairs: tuple[int, int]) -> ChunkReady:
    return ChunkReady(FENCE, [position for position, _ in pairs], [block for _, block in pairs])


def everything(hand_over: HandOver, max_blocks: int = 8) -> list[object]:
    return list(iter(lambda: hand_over.take(max_blocks), None))


def test_finished_chunks_leave_while_the_rest_is_computed() -> None:
    hand_over = HandOver([0, 1, 2])
    assert hand_over.take(8) is None
    hand_over.on_chunk(chunk((0, 10), (1, 11)))
    assert everything(hand_over) == [Blocks([(0, 10), (1, 11)])]
    assert hand_over.state is HandOverState.COMPUTING


@pytest.mark.conformance(47)
def test_the_first_token_overtakes_blocks_that_wait() -> None:
    hand_over = HandOver([0, 1])
    hand_over.on_chunk(chunk((0, 10)))
    hand_over.on_chunk(chunk((1, 11)))
    hand_over.on_first_token(FirstToken(5))
    assert everything(hand_over, max_blocks=1) == [FirstToken(5), Blocks([(0, 10)]), Blocks([(1, 11)]), Commit()]
    assert hand_over.state is HandOverState.COMMITTED


def test_the_first_token_may_come_before_the_last_blocks_are_reported() -> None:
    hand_over = HandOver([0])
    hand_over.on_first_token(FirstToken(5))
    assert everything(hand_over) == [FirstToken(5)]
    hand_over.on_chunk(chunk((0, 10)))
    assert everything(hand_over) == [Blocks([(0, 10)]), Commit()]


def test_no_commit_without_a_first_token() -> None:
    hand_over = HandOver([0])
    hand_over.on_chunk(chunk((0, 10)))
    assert everything(hand_over) == [Blocks([(0, 10)])]


def test_a_failure_overtakes_everything_and_ends_the_stream() -> None:
    hand_over = HandOver([0])
    hand_over.on_chunk(chunk((0, 10)))
    hand_over.on_first_token(FirstToken(5))
    hand_over.fail(FULL)
    hand_over.fail(Overloaded("again").record())
    assert everything(hand_over) == [FULL]
    assert hand_over.over


def test_a_failure_after_the_commit_changes_nothing() -> None:
    hand_over = HandOver([0])
    hand_over.on_chunk(chunk((0, 10)))
    hand_over.on_first_token(FirstToken(5))
    everything(hand_over)
    hand_over.fail(FULL)
    assert hand_over.take(8) is None and hand_over.state is HandOverState.COMMITTED


def test_a_block_that_was_not_wanted_is_a_bug() -> None:
    hand_over = HandOver([0])
    hand_over.on_chunk(chunk((3, 10)))
    with pytest.raises(AssertionError, match="not outstanding"):
        hand_over.take(8)


def test_every_state_has_its_row() -> None:
    assert set(TRANSITIONS) == set(HandOverState)
