import msgspec
import pytest

from orchestrator.routing.break_even import (
    RESTORE_S,
    Speeds,
    apart_s,
    here_s,
    here_wins,
    restore_s,
    restored_worth,
    task,
    transfer_s,
)
from orchestrator.routing.break_even_page import PAGE, page
from orchestrator.routing.speeds import LearnedSpeeds
from pipelines.types.frames import NodeReport, TierReport
from pronghorn.ids import Incarnation
from tests.fakes.memory_node import record, report

SPEEDS = Speeds(prefill_tokens_per_s=1000.0)


def test_the_page_is_what_the_model_makes() -> None:
    assert PAGE.read_text() == page(), "run `python -m orchestrator.routing.break_even_page`"


def test_a_transfer_costs_only_what_the_computing_does_not_hide() -> None:
    fast, slow = transfer_s(1e6, 1e9), transfer_s(1e6, 1e5)
    assert apart_s(task(1000, 0, SPEEDS), fast) == pytest.approx(1.0, abs=0.01)
    assert apart_s(task(1000, 0, SPEEDS), slow) == pytest.approx(10.0, abs=0.01)


def test_more_streams_a_faster_link_and_a_shorter_queue_speak_for_apart() -> None:
    assert here_s(task(1000, 0, SPEEDS), 10) > here_s(task(1000, 0, SPEEDS), 0)
    assert here_wins(here_s(task(1000, 0, SPEEDS), 0), apart_s(task(1000, 2000, SPEEDS), 0.0))
    assert not here_wins(here_s(task(1000, 0, SPEEDS), 0), apart_s(task(1000, 0, SPEEDS), 0.0))


@pytest.mark.parametrize("tokens", [1, 100, 10_000])
def test_here_is_never_taken_where_it_is_not_predicted_to_be_sooner(tokens: int) -> None:
    for queued in (0, 10, 1000, 100_000):
        here, apart = here_s(task(tokens, 0, SPEEDS), 4), apart_s(task(tokens, queued, SPEEDS), 0.0)
        assert not here_wins(here, apart) or here < apart


def test_what_is_brought_back_is_waited_for_beside_the_queue_and_costs_nobody_else() -> None:
    speeds = Speeds(prefill_tokens_per_s=1000.0, host_bytes_per_s=1e6, disk_bytes_per_s=1e5)
    assert restore_s(0.0, 0.0, speeds) == 0.0
    assert restore_s(1e6, 1e5, speeds) == pytest.approx(2.0 + RESTORE_S)
    assert task(10, 0, speeds, 2.0) == task(10, 2000, speeds) == task(10, 2000, speeds, 1.0)
    assert here_s(task(10, 0, speeds, 2.0), 8) == pytest.approx(2.0 + 0.01 * 1.4)


def test_a_restored_token_is_worth_what_it_saves() -> None:
    speeds = Speeds(prefill_tokens_per_s=1000.0)
    assert restored_worth(1000.0, 1e7, speeds) == pytest.approx(0.9)
    assert restored_worth(1000.0, 1e5, speeds) == 0.0


# --- learning ---------------------------------------------------------------------------------------------------------

NODE = Incarnation("node.life")


def beat(prompt: float = 0.0, generation: float = 0.0, running: int = 0) -> NodeReport:
    plain = report(record("node", incarnation=NODE), in_flight=running)
    fields = {name: getattr(plain, name) for name in NodeReport.__struct_fields__}
    return NodeReport(**fields | {"prompt_throughput": prompt, "generation_throughput": generation})


def test_a_nodes_speed_is_its_own_and_an_unmeasured_one_is_taken_for_the_others() -> None:
    speeds = LearnedSpeeds()
    assert speeds.of(NODE) == Speeds()
    speeds.heartbeat(beat(prompt=500.0))
    assert speeds.of(NODE).prefill_tokens_per_s == speeds.of(Incarnation("new")).prefill_tokens_per_s == 500.0


def test_a_repeated_report_counts_once_and_new_ones_pull() -> None:
    speeds = LearnedSpeeds()
    for rate in (500.0, 1000.0, 1000.0, 1000.0):
        speeds.heartbeat(beat(prompt=rate))
    assert speeds.of(NODE).prefill_tokens_per_s == pytest.approx(600.0)


def test_a_step_is_what_a_running_node_generates() -> None:
    speeds = LearnedSpeeds()
    speeds.heartbeat(beat(generation=200.0, running=4))
    assert speeds.of(NODE).step_s == pytest.approx(0.02)


def test_a_tiers_speed_is_the_nodes_word_and_the_others_where_it_has_none() -> None:
    speeds, new = LearnedSpeeds(), Incarnation("new")
    speeds.heartbeat(msgspec.structs.replace(beat(), tiers={"host": TierReport(5)}))
    assert speeds.of(NODE) == Speeds()
    for _ in range(3):  # it says so until it has brought something back again
        speeds.heartbeat(msgspec.structs.replace(beat(), tiers={"host": TierReport(5, 1e9), "disk": TierReport(9)}))
    other = Incarnation("other.life")
    fast = msgspec.structs.replace(beat(), incarnation=other, tiers={"host": TierReport(5, 2e9)})
    speeds.heartbeat(fast)
    assert speeds.of(NODE).host_bytes_per_s == 1e9 and speeds.of(other).host_bytes_per_s == 2e9
    assert speeds.of(new).host_bytes_per_s == pytest.approx(1.2e9)
    assert speeds.of(NODE).disk_bytes_per_s == Speeds().disk_bytes_per_s
    speeds.forget(NODE)
    assert speeds.of(NODE).host_bytes_per_s == pytest.approx(1.2e9)


def test_a_tail_tells_of_a_slow_link_and_none_only_of_one_at_least_so_fast() -> None:
    speeds = LearnedSpeeds()
    for _ in range(50):
        speeds.handed_over(NODE, moved_bytes=1e8, compute_s=1.0, tail_s=9.0)
    assert speeds.of(NODE).link_bytes_per_s == pytest.approx(1e7, rel=0.05)
    speeds.handed_over(NODE, moved_bytes=1e3, compute_s=1.0, tail_s=0.0)
    assert speeds.of(NODE).link_bytes_per_s == pytest.approx(1e7, rel=0.05)
    speeds.forget(NODE)
