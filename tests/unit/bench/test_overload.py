import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from bench.overload import SLOWEST, Asked, Heard, Watched, give_cores, goodput, memory, schedule, stalled_s
from cluster.chaos.growth import Life


def heard(prompt_tokens, new_tokens, *times_s, whole=True):
    return Heard(Asked(prompt_tokens, new_tokens), 0.0, 200, list(times_s), whole)


def test_goodput_counts_the_prompt_with_the_first_piece_and_spreads_the_answer_over_all():
    requests = [heard(100, 8, 1.0, 2.0, 11.0, 12.0), heard(50, 1, 15.0)]
    assert goodput(requests, 0.0, 20.0, 10.0) == [(100 + 4) / 10, (4 + 50 + 1) / 10]


def test_goodput_leaves_out_what_was_not_answered_whole_and_what_came_at_other_times():
    requests = [heard(100, 8, 1.0, whole=False), heard(100, 2, 21.0, 22.0), heard(0, 4, 9.0, 25.0)]
    assert goodput(requests, 0.0, 20.0, 20.0) == [2 / 20]


def test_the_longest_silence_reaches_from_the_beginning_to_the_end():
    requests = [heard(1, 2, 3.0, 4.0), heard(1, 1, 6.5, whole=False)]
    assert stalled_s(requests, 0.0, 8.0) == 3.0
    assert stalled_s(requests, 2.5, 8.0) == 2.5
    assert stalled_s([], 0.0, 8.0) == 8.0


def test_a_schedule_has_the_rate_and_the_share_that_were_asked_for_and_is_the_same_again():
    drawn = schedule(20.0, 500.0, 0.04, seed=7)
    assert drawn == schedule(20.0, 500.0, 0.04, seed=7) != schedule(20.0, 500.0, 0.04, seed=8)
    assert len(drawn) == pytest.approx(10_000, rel=0.05)
    assert sum(asked.urgent for _, asked in drawn) == pytest.approx(400, rel=0.2)
    moments = [at_s for at_s, _ in drawn]
    assert moments == sorted(moments) and 0.0 < moments[0] and moments[-1] < 500.0


def test_memory_is_of_processes_that_lived_throughout():
    whole, late = Life(1, 0.0), Life(2, 0.0)
    samples = [(-1.0, 10.0), (2.0, 14.0), (4.0, 12.0), (6.0, 13.0), (12.0, 11.0)]
    watched = Watched({whole: "engine", late: "late"}, {whole: samples, late: samples[2:]})
    [row] = memory(watched, 0.0, 10.0)
    assert row == {"process": "engine", "pid": 1, "before": 10.0, "first_half": 14.0, "second_half": 13.0, "last": 11.0}


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core only"
)
def test_the_slowest_process_gets_a_core_that_no_other_has():
    cores = os.sched_getaffinity(0)
    wait = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True)"
    with (
        subprocess.Popen([sys.executable, "-c", wait, SLOWEST], stdin=-1, stdout=-1) as slowest,
        subprocess.Popen([sys.executable, "-c", wait], stdin=-1, stdout=-1) as other,
    ):
        try:
            for process in (slowest, other):
                assert process.stdout is not None
                process.stdout.readline()  # its second thread runs
            site = SimpleNamespace(of_run=lambda: [psutil.Process(slowest.pid), psutil.Process(other.pid)])
            assert give_cores(site)
            of_slowest = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir(f"/proc/{slowest.pid}/task")}
            of_other = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir(f"/proc/{other.pid}/task")}
            assert of_slowest == {frozenset({min(cores)})}
            assert of_other == {frozenset(cores - {min(cores)})} == {frozenset(os.sched_getaffinity(0))}
        finally:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores)
            for process in (slowest, other):
                process.communicate()
