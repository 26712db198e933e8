import pytest

from cluster.chaos.memory import MIB, Growth, Life, Memory

LIFE = Life(7, 0.0)


def grown(sizes_mib: list[float], every_s: float = 3.0) -> list[Growth]:
    memory = Memory()
    for number, size in enumerate(sizes_mib):
        memory.see(number * every_s, [(LIFE, "node", round(size * MIB))])
    return memory.growths()


def test_what_grows_steadily_has_its_slope() -> None:
    [growth] = grown([100 + 0.1 * n for n in range(60)])
    assert growth.mib_per_minute == pytest.approx(2.0)
    assert (growth.title, growth.pid) == ("node", 7)


def test_what_fills_at_the_start_and_stays_does_not_grow() -> None:
    [growth] = grown([min(200.0, 100 + 10.0 * n) for n in range(60)])
    assert growth.mib_per_minute == 0.0


def test_what_was_seen_for_a_moment_has_no_slope() -> None:
    assert grown([100.0] * 5) == []


def test_a_pid_that_comes_again_is_another_process_and_the_fastest_stands_first() -> None:
    memory = Memory()
    for number in range(40):
        flat, steep = (Life(7, 0.0), "old", 100 * MIB), (Life(7, 50.0), "new", (100 + number) * MIB)
        memory.see(float(number), [flat, steep])
    assert [growth.title for growth in memory.growths()] == ["new", "old"]
