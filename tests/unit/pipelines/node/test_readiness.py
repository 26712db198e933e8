from pipelines.node.readiness import Strays, overdue_reason, silence_reason
from pronghorn.ledger import Held, Kind


def stock(*owners: str) -> list[Held]:
    return [Held(Kind.BLOCKS, owner, 4) for owner in owners] + [Held(Kind.SEQUENCE, owner) for owner in owners]


def test_an_attempt_that_the_shell_holds_is_no_stray() -> None:
    strays = Strays()
    strays.note(stock("a", "b"), {"a", "b"}, 0.0)
    assert len(strays) == 0 and strays.reason(100.0, 1.0) is None


def test_what_was_just_released_is_no_leak_yet() -> None:
    strays = Strays()
    strays.note(stock("a"), set(), 0.0)
    assert strays.reason(1.0, 10.0) is None
    strays.note(stock(), set(), 2.0)
    assert len(strays) == 0


def test_what_stays_though_nobody_wants_it_is_named_with_its_age() -> None:
    strays = Strays()
    strays.note(stock("a"), set(), 0.0)
    strays.note(stock("a", "b"), set(), 2.0)
    reason = strays.reason(11.0, 10.0)
    assert reason is not None and "1 leftovers" in reason and "a's of 11.0 s" in reason


def test_blocks_that_no_attempt_has_are_leftovers_too() -> None:
    strays = Strays()
    strays.note([Held(Kind.BLOCKS, "", 3)], {"a"}, 0.0)
    assert "nobody" in (strays.reason(11.0, 10.0) or "")


def test_an_empty_pool_ends_every_suspicion() -> None:
    strays = Strays()
    strays.note(stock("a"), set(), 0.0)
    strays.clear()
    assert strays.reason(99.0, 10.0) is None


def test_silence_and_delay_are_told_beyond_the_bound_only() -> None:
    assert silence_reason(9.0, 10.0) is None and "12.0 s" in (silence_reason(12.0, 10.0) or "")
    assert overdue_reason(0.5, 10.0) is None and "11.0 s past" in (overdue_reason(11.0, 10.0) or "")
