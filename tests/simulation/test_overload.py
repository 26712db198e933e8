"""Four times what a cluster can do, on virtual time, through the real admission and router: shed, not stalled."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from cluster.simulator.load_model import LoadModel, LoadResult, NodeTiming
from cluster.simulator.load_report import make_router
from cluster.simulator.trace import TraceRequest
from orchestrator.admission import Admission, Limits
from orchestrator.holdings import Holdings
from pronghorn.counters import Counters

PREFILL, DECODE = 4, 4
TIMING = NodeTiming(chunk_tokens=256)
LIMITS = Limits(max_in_flight=DECODE * TIMING.max_batch, max_queue=200, max_queue_wait_s=5.0)
START_ROOM = 32
WARM_S, OVER_S, AFTER_S = 20.0, 180.0, 40.0
WINDOW_S = 10.0
UNLOADED_PER_S = 1.0
URGENT = -1
URGENT_SHARE = 0.03
"""Of the arrivals: an eighth of what fits, at four times that."""
KEYS = ("greedy", "greedy", "greedy", "a", "b", "c")
"""One asks for as much as three others together."""


@dataclass(frozen=True)
class Phase:
    until_s: float
    per_s: float


def arrivals(seed: int, phases: list[Phase], urgent_share: float) -> Iterator[TraceRequest]:
    random, at_s = Random(seed), 0.0
    for phase in phases:
        while (at_s := at_s + random.expovariate(phase.per_s)) < phase.until_s:
            prompt_tokens = 1 + min(4000, int(random.lognormvariate(6.5, 0.6)))
            output_tokens = 1 + min(500, int(random.lognormvariate(4.8, 0.6)))
            priority = URGENT if random.random() < urgent_share else 0
            yield TraceRequest(at_s, prompt_tokens, output_tokens, (), priority, random.choice(KEYS))
        at_s = phase.until_s


def run(load: Iterator[TraceRequest]) -> LoadResult:
    holdings, admission = Holdings(1 << 24, Counters()), Admission(LIMITS)
    admission.make_room(START_ROOM, 0.0)
    return LoadModel(PREFILL, DECODE, make_router("kv_aware", holdings, TIMING, 0), holdings, admission, TIMING).run(
        load
    )


def windows(result: LoadResult, until_s: float) -> list[float]:
    """Tokens a second of requests that ended in each window, from the end of the start on."""
    edges = np.arange(WARM_S, until_s + 1e-6, WINDOW_S)
    at_s, tokens = zip(*result.ended, strict=True)
    return list(np.histogram(at_s, edges, weights=tokens)[0] / WINDOW_S)


@dataclass(frozen=True)
class Shown:
    capacity: float
    capacity_per_s: float
    unloaded: LoadResult
    over: LoadResult


@pytest.fixture(scope="module")
def shown() -> Shown:
    """A load that just keeps a queue tells the capacity; then hardly any, and then four times as much as fits."""
    full = run(arrivals(1, [Phase(WARM_S + 100.0, 60.0)], 0.0))
    assert full.shed, "it was no full load"
    capacity = float(np.mean(windows(full, WARM_S + 100.0)))
    capacity_per_s = sum(WARM_S <= at_s < WARM_S + 100.0 for at_s, _ in full.ended) / 100.0
    unloaded = run(arrivals(2, [Phase(2000.0, UNLOADED_PER_S)], URGENT_SHARE))
    phases = [Phase(WARM_S + OVER_S, 4 * capacity_per_s), Phase(WARM_S + OVER_S + AFTER_S, UNLOADED_PER_S)]
    return Shown(capacity, capacity_per_s, unloaded, run(arrivals(3, phases, URGENT_SHARE)))


@pytest.mark.field("sglang#10110")
def test_goodput_stays_at_what_the_cluster_can_do_all_the_time(shown: Shown) -> None:
    goodput = [each / shown.capacity for each in windows(shown.over, WARM_S + OVER_S)]
    assert min(goodput) >= 0.9
    ends = np.array([at_s for at_s, _ in shown.over.ended if at_s < WARM_S + OVER_S])
    assert np.diff(ends).max() < 2.0, "nothing ended for two seconds"


@pytest.mark.field("llm-d-router#1934", "llm-d-router#2066", "llm-d-router#412")
def test_the_urgent_are_served_as_if_there_were_no_overload_and_the_others_are_shed(shown: Shown) -> None:
    urgent = np.percentile(shown.over.ttft_by_priority[URGENT], 99)
    unloaded = np.percentile(shown.unloaded.ttft_s, 99)
    assert urgent <= 1.3 * unloaded
    assert shown.over.shed > 2 * len(shown.over.ended) and len(shown.over.ttft_by_priority[URGENT]) > 100


def test_what_waits_is_bounded_and_the_wait_of_those_that_are_admitted_too(shown: Shown) -> None:
    assert shown.over.most_in_flight <= LIMITS.max_in_flight + LIMITS.max_queue
    waited_s = np.percentile(shown.over.ttft_by_priority[0], 99) - np.percentile(shown.unloaded.ttft_s, 99)
    assert waited_s <= LIMITS.max_queue_wait_s + 3.0, "beside the queue there are places on nodes without a first token"


def test_when_the_load_falls_the_queue_is_gone_within_what_it_was_told_to_wait(shown: Shown) -> None:
    """A request that comes then finds an idle cluster: nothing of the overload is remembered against it."""
    late = shown.over.ttft_s[-20:]
    assert max(late) <= 1.3 * np.percentile(shown.unloaded.ttft_s, 99)
    assert shown.over.ended[-1][0] < WARM_S + OVER_S + AFTER_S + 30.0
