import pytest

from pipelines.text.stop_strings import StopStringScanner


def test_without_stops_everything_passes_at_once() -> None:
    scanner = StopStringScanner([])
    assert scanner.push("abc") == "abc" and scanner.finish() == "" and scanner.matched is None


@pytest.mark.conformance(24)
def test_the_text_before_a_stop_and_nothing_after() -> None:
    scanner = StopStringScanner(["END"])
    assert scanner.push("abENDcd") == "ab"
    assert scanner.matched == "END"
    assert scanner.push("more") == "" and scanner.finish() == ""


def test_a_beginning_is_held_until_it_is_known() -> None:
    scanner = StopStringScanner(["END"])
    assert scanner.push("aE") == "a"
    assert scanner.push("N") == ""
    assert scanner.push("x") == "ENx"
    assert scanner.push("EEN") == "E"
    assert scanner.finish() == "EN"


def test_the_stop_that_is_complete_first_wins() -> None:
    scanner = StopStringScanner(["abcd", "bc"])
    assert scanner.push("xabcd") == "xa" and scanner.matched == "bc"


def test_of_two_complete_at_once_the_longest_wins() -> None:
    scanner = StopStringScanner(["c", "abc"])
    assert scanner.push("xabc") == "x" and scanner.matched == "abc"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringScanner(["a", ""])
