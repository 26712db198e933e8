from pipelines.node.ended_fences import EndedFences
from pronghorn.ids import Fence, RequestID, new_incarnation


def test_the_newest_are_known_and_the_oldest_forgotten() -> None:
    ended = EndedFences(capacity=3)
    life = new_incarnation()
    fences = [Fence(RequestID("r"), attempt, life) for attempt in range(5)]
    for fence in fences:
        ended.add(fence)
    assert [fence in ended for fence in fences] == [False, False, True, True, True]
    assert len(ended) == 3


def test_one_that_is_said_twice_counts_once() -> None:
    ended = EndedFences(capacity=2)
    fence = Fence(RequestID("r"), 1, new_incarnation())
    ended.add(fence)
    ended.add(fence)
    assert len(ended) == 1
