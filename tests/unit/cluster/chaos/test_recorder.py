import asyncio

import pytest

from cluster.chaos.recorder import ANSWERED, BROKEN, LATE, LEFT, MOST_KEPT, Recorder, Request, Verdict, unlikeness

TEXT = "one two three four five"


@pytest.mark.parametrize(
    ("text", "whole", "found"),
    [
        (TEXT, True, None),
        ("one two", False, None),
        ("", False, None),
        ("one two", True, Verdict.LOST),
        ("one two four five", True, Verdict.LOST),
        ("one two two three four five", True, Verdict.DUPLICATED),
        ("one two three four five four five", True, Verdict.DUPLICATED),
        ("one two one two three", False, Verdict.DUPLICATED),
        ("one two drei four five", True, Verdict.WRONG),
        ("one tvo", False, Verdict.WRONG),
    ],
)
def test_a_text_is_told_from_what_was_due(text: str, whole: bool, found: Verdict | None) -> None:
    assert unlikeness(TEXT, text, whole) is found


def recorded(*tries: tuple[str, str]) -> Request:
    """A request whose tries heard a text and ended so."""
    recorder = Recorder(lambda: 0.0)
    request = recorder.open(0, TEXT)
    for text, how in tries:
        one = recorder.sent(request)
        recorder.heard(one, text)
        recorder.end_try(one, how)
    recorder.end(request)
    return request


@pytest.mark.parametrize(
    ("tries", "verdict"),
    [
        ([(TEXT, ANSWERED)], Verdict.ANSWERED),
        ([("one", LEFT)], Verdict.LEFT),
        ([("one", BROKEN)], Verdict.LOST),
        ([("one", LATE)], Verdict.LOST),
        ([("one", "node_lost")], Verdict.ERROR),
        ([("one", BROKEN), (TEXT, ANSWERED)], Verdict.ANSWERED),
        ([("two", BROKEN), (TEXT, ANSWERED)], Verdict.LOST),
        ([("eins", "node_lost"), (TEXT, ANSWERED)], Verdict.WRONG),
    ],
)
def test_a_request_is_judged_by_its_last_try_and_by_all_that_was_said(
    tries: list[tuple[str, str]], verdict: Verdict
) -> None:
    assert recorded(*tries).verdict() is verdict


def test_a_request_that_nothing_was_heard_of_is_lost() -> None:
    recorder = Recorder(lambda: 0.0)
    assert recorder.open(0, TEXT).verdict() is Verdict.LOST


def test_times_are_counted_from_the_beginning_of_the_load() -> None:
    now_s = 100.0
    recorder = Recorder(lambda: now_s)
    request = recorder.open(0, TEXT)
    now_s = 101.0
    one = recorder.sent(request)
    for at_s, text in ((102.5, "one"), (103.0, " two"), (107.0, " three four five")):
        now_s = at_s
        recorder.heard(one, text)
    recorder.end_try(one, ANSWERED)
    assert (one.sent_s, one.first_s, one.end_s, one.longest_gap_s) == (1.0, 2.5, 7.0, 4.0)
    assert (recorder.first_token_s(), recorder.longest_gap_s()) == ([1.5], 4.0)


def test_requests_of_a_fault_are_counted_apart() -> None:
    recorder = Recorder(lambda: 0.0)
    for extra in (False, True, True):
        request = recorder.open(0, TEXT, extra)
        one = recorder.sent(request)
        recorder.end_try(one, LEFT)
    assert recorder.verdicts(extra=False) == {Verdict.LEFT: 1}
    assert recorder.verdicts(extra=True) == {Verdict.LEFT: 2}
    assert recorder.verdicts() == {Verdict.LEFT: 3}


async def test_whoever_waits_for_a_moment_is_told_when_it_has_come() -> None:
    recorder = Recorder(lambda: 0.0)
    one = recorder.sent(recorder.open(0, TEXT))
    moment = asyncio.ensure_future(recorder.until(lambda: recorder.pieces >= 2))
    recorder.heard(one, "one")
    await asyncio.sleep(0)
    assert not moment.done()
    recorder.heard(one, " two")
    await asyncio.wait_for(moment, 30.0)
    await recorder.until(lambda: recorder.pieces >= 1)


def test_what_went_wrong_is_told_with_both_texts() -> None:
    recorder = Recorder(lambda: 0.0)
    request = recorder.open(7, TEXT)
    one = recorder.sent(request)
    recorder.heard(one, "eins")
    recorder.end_try(one, ANSWERED)
    [told] = recorder.told(Verdict.WRONG)
    assert "prompt 7" in told and "'eins'" in told and repr(TEXT) in told


def test_of_a_load_without_an_end_only_what_went_wrong_is_kept_and_no_more_of_it_than_is_told() -> None:
    recorder = Recorder(lambda: 0.0, forgets=True)

    def ended(text: str, how: str, extra: bool = False) -> None:
        request = recorder.open(0, TEXT, extra)
        one = recorder.sent(request)
        recorder.heard(one, text)
        recorder.end_try(one, how)
        recorder.end(request)

    for _ in range(1000):
        ended(TEXT, ANSWERED)
        ended("one", LEFT, extra=True)
    running = recorder.open(0, TEXT)
    assert recorder.requests == [running] and running.number == 2000
    for _ in range(2 * MOST_KEPT):
        ended("eins", ANSWERED)
    assert len(recorder.requests) == 1 + MOST_KEPT
    assert recorder.verdicts(extra=False) == {
        Verdict.ANSWERED: 1000, Verdict.WRONG: 2 * MOST_KEPT, Verdict.LOST: 1
    }  # fmt: skip
    assert recorder.verdicts(extra=True) == {Verdict.LEFT: 1000}
    assert len(recorder.told(Verdict.WRONG)) == 3


def test_of_what_nobody_knows_any_text_is_right() -> None:
    recorder = Recorder(lambda: 0.0)
    request = recorder.open(0, None)
    one = recorder.sent(request)
    recorder.heard(one, "whatever")
    recorder.end_try(one, ANSWERED)
    assert request.verdict() is Verdict.ANSWERED


def test_errors_are_counted_by_their_code() -> None:
    recorder = Recorder(lambda: 0.0, forgets=True)
    for how in (BROKEN, "node_lost", "node_lost", ANSWERED):
        request = recorder.open(0, TEXT)
        one = recorder.sent(request)
        recorder.heard(one, TEXT if how == ANSWERED else "one")
        recorder.end_try(one, how)
        recorder.end(request)
    assert recorder.errors == {"node_lost": 2}
