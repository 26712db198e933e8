from orchestrator.picks import DEGRADED_SHARE, KEPT, LEAST, WINDOW_S, Picks


def noted(well: int, failed: int, at_s: float = 0.0) -> Picks:
    picks = Picks()
    for number in range(well + failed):
        picks.note(number < well, at_s)
    return picks


def test_more_than_a_share_of_failures_is_told() -> None:
    failed = int(DEGRADED_SHARE * 50)
    assert noted(50 - failed, failed).degraded(0.0) is None
    assert (
        noted(49 - failed, failed + 1).degraded(0.0) == "11 of the last 50 nodes that were picked failed, within 60 s"
    )


def test_of_few_picks_nothing_is_said() -> None:
    assert noted(0, LEAST - 1).degraded(0.0) is None
    assert noted(0, LEAST).degraded(0.0) is not None


def test_what_is_long_ago_and_what_many_others_followed_is_forgotten() -> None:
    picks = noted(0, LEAST)
    assert picks.degraded(WINDOW_S) is not None
    assert picks.degraded(WINDOW_S + 0.1) is None
    for _ in range(KEPT):
        picks.note(True, 1.0)
    assert picks.degraded(1.0) is None
