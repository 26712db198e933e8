import pytest

from cluster.chaos.growth import Growth, Life, Taken, Watch

LIFE = Life(7, 0.0)


def grown(amounts: list[float], what: str = "own MiB", every_s: float = 3.0) -> list[Growth]:
    watch = Watch()
    for number, amount in enumerate(amounts):
        watch.see(number * every_s, [Taken(LIFE, "node", {what: amount})])
    return watch.growths()


def test_what_grows_steadily_has_its_slope_and_is_told() -> None:
    [growth] = grown([100 + 0.1 * n for n in range(320)])
    assert growth.per_minute == pytest.approx(2.0)
    assert (growth.title, growth.pid, growth.is_clear) == ("node", 7, True)


def test_what_fills_at_the_start_and_stays_does_not_grow() -> None:
    [growth] = grown([min(200.0, 100 + 10.0 * n) for n in range(320)])
    assert (growth.per_minute, growth.is_clear) == (0.0, False)


def test_what_comes_with_a_burst_and_goes_does_not_grow() -> None:
    [growth] = grown([50.0 + (100.0 if n > 120 and n % 10 else 0.0) for n in range(320)], "descriptors")
    assert growth.per_minute == 0.0


def test_what_is_left_behind_now_and_then_is_seen_through_the_bursts() -> None:
    [growth] = grown([50.0 + n // 16 + (100.0 if n % 10 else 0.0) for n in range(320)], "descriptors")
    assert growth.is_clear


@pytest.mark.parametrize(("more", "is_clear"), [(0, False), (1, True)])
def test_an_index_that_faults_empty_is_judged_by_what_it_comes_to(more: int, is_clear: bool) -> None:
    [growth] = grown([min(100, n % 50 * 10) + more * n for n in range(320)], "index KiB")
    assert growth.is_clear is is_clear


def test_what_was_seen_for_a_moment_has_no_slope_and_what_was_seen_for_minutes_is_not_judged() -> None:
    assert grown([100.0] * 5) == []
    [growth] = grown([100.0 + n for n in range(100)])
    assert growth.per_minute > 1.0 and not growth.is_clear


def test_a_pid_that_comes_again_is_another_process_and_the_fastest_stands_first() -> None:
    watch = Watch()
    for number in range(40):
        flat, steep = (
            Taken(Life(7, 0.0), "old", {"own MiB": 100.0}),
            Taken(Life(7, 50.0), "new", {"own MiB": 100.0 + number}),
        )
        watch.see(10.0 * number, [flat, steep])
    assert [growth.title for growth in watch.growths()] == ["new", "old"]


def test_blocks_that_are_written_for_the_first_time_are_no_leak() -> None:
    [growth] = grown([100.0 + n for n in range(320)], "MiB")
    assert growth.per_minute > 1.0 and not growth.is_clear
