"""Batches as plays: what stands in the queues, and exactly what the next step computes."""

from dataclasses import dataclass

import pytest

from pipelines.runtime.batching import Batcher, Policy, StepBudget, blocks_for
from pipelines.runtime.config import EngineConfig, SchedulingStrategy
from pipelines.runtime.replica import Replica, Stage
from pipelines.types.text_context import TextContext
from tests.fakes.canary_engine import canary_caches, canary_config, canary_context

STRATEGIES: list[SchedulingStrategy] = ["prefill_first", "decode_first", "balanced", "per_replica"]

# --- budgets ---------------------------------------------------------------------------------------------------------


def windows(budget: StepBudget, *lengths: int) -> list[int]:
    """The windows that are taken of prompts of these lengths, until one does not fit."""
    contexts = [canary_context(range(1, 1 + length)) for length in lengths]
    taken: list[int] = []
    for context in contexts:
        if not budget.take(context):
            break
        taken.append(context.tokens.active_length)
    untouched = contexts[len(taken) :]
    assert not any(context.tokens.actively_chunked for context in (*contexts[: len(taken) - 1], *untouched))
    return taken


@pytest.mark.conformance(50)
def test_windows_are_taken_whole_until_the_last_is_cut_to_what_is_left() -> None:
    assert windows(StepBudget(10), 4, 9, 1) == [4, 6]


def test_a_window_that_fits_exactly_is_no_chunk_and_closes_the_batch() -> None:
    budget, context = StepBudget(4), canary_context([1, 2, 3, 4])
    assert budget.take(context) and budget.tokens_left == 0
    assert not context.tokens.actively_chunked
    assert windows(budget, 1) == []


def test_a_partial_block_counts_as_one() -> None:
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ((7, 20), [7]),  # what is left, 3, is below the least chunk: deferred
        ((6, 20), [6, 4]),
        ((12,), [8]),  # cut earlier than it could be, so that the rest is a chunk too
        ((13,), [9]),
        ((14,), [10]),
        ((5, 7), [5]),  # no cut of 7 leaves 4 on either side of it
        ((2, 9, 1), [2, 5]),  # 8 tokens are left, and the cut closes the batch
    ],
)
@pytest.mark.conformance(50)
def test_neither_piece_of_a_cut_prompt_is_below_the_least_chunk(lengths: tuple[int, ...], taken: list[int]) -> None:
    assert windows(StepBudget(10, min_chunk_tokens=4), *lengths) == taken


@pytest.mark.conformance(50)
def test_without_chunks_the_prompt_that_overflows_is_admitted_and_closes_the_batch() -> None:
    assert windows(StepBudget(10, chunked=False), 4, 5, 30, 1) == [4, 5, 30]
    assert windows(StepBudget(10, chunked=False), 4, 6, 30) == [4, 6]


@pytest.mark.conformance(50)
def test_total_context_is_counted_in_whole_blocks_and_never_cuts() -> None:
    def budget() -> StepBudget:
        return StepBudget(100, max_total_tokens=16, block_tokens=4)

    assert windows(budget(), 5, 8) == [5, 8]  # 8 + 8
    assert windows(budget(), 5, 9, 1) == [5], "9 tokens count as 12, and what comes behind does not overtake"
    assert windows(budget(), 40, 1) == [40], "alone, a context always fits"


def test_total_context_counts_what_was_computed_before() -> None:
    budget = StepBudget(100, max_total_tokens=16, block_tokens=4)
    begun = canary_context(range(12))
    begun.tokens.skip_processing(10)
    assert budget.take(begun) and budget.total_left == 4


def test_active_tokens_are_asked_first_and_what_they_cut_off_is_not_counted() -> None:
    budget = StepBudget(8, max_total_tokens=16, block_tokens=4)
    assert windows(budget, 40) == [8] and budget.total_left == 8


def test_decoding_sequences_alone_have_no_bound_on_their_context() -> None:
    budget = StepBudget(8, max_total_tokens=8, block_tokens=4)
    contexts = [decoding(20).context for _ in range(3)]
    assert all(budget.take(context, bounded=False) for context in contexts)
    assert windows(budget, 1) == [], "but a prompt beside them has to fit"


# --- which kind comes first ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    context: TextContext
    arrival: int = 0


def prompt(length: int) -> Job:
    return Job(canary_context(range(1, 1 + length)))


def decoding(length: int = 3) -> Job:
    job = prompt(length)
    job.context.update(7)
    return job


class Play:
    """Replicas by what stands in their queues: "c" a prompt of 6 tokens, "t" a decoding sequence."""

    def __init__(self, *queues: str, strategy: SchedulingStrategy, in_flight: bool = False, **config: object) -> None:
        self.config: EngineConfig = canary_config(data_parallel=len(queues), **config)
        caches, self.hasher = canary_caches(self.config)
        self.replicas = [Replica[Job](index, cache) for index, cache in enumerate(caches)]
        for replica, kinds in zip(self.replicas, queues, strict=True):
            for kind in kinds:
                self.add(replica.index, kind)
        policy = Policy.of(self.config, strategy=strategy, in_flight=in_flight)
        self.batcher = Batcher(self.config, policy, self.replicas)

    def add(self, replica: int, kind: str) -> None:
        job, stage = (prompt(6), Stage.PROMPT) if kind == "c" else (decoding(), Stage.DECODING)
        self.replicas[replica].move(job, None, stage)

    def press(self, replica: int, blocks: int) -> None:
        cache = self.replicas[replica].cache
        cache.claim("pressure", self.hasher.root(None))
        cache.reserve("pressure", blocks * self.config.block_tokens)

    def next(self) -> list[str]:
        """The kinds of the step's contexts, by replica."""
        batches = self.batcher.next()
        for replica in self.replicas:
            for job in replica.prompts:
                if job.context.tokens.actively_chunked:
                    job.context.update(0)
        return ["".join("t" if c.tokens.generated_length else "c" for c in batch) for batch in batches]


@pytest.mark.parametrize(
    ("strategy", "queues", "batches"),
    [
        ("prefill_first", ["ct"], ["c"]),
        ("prefill_first", ["tt"], ["tt"]),
        ("prefill_first", ["tt", "c", ""], ["", "c", ""]),
        ("decode_first", ["ct"], ["t"]),
        ("decode_first", ["c", "t", "ct"], ["", "t", "t"]),
        ("decode_first", ["c", "cc", ""], ["c", "cc", ""]),
        ("per_replica", ["ct", "t", "c", ""], ["c", "t", "c", ""]),
        ("balanced", ["ct", "c", "t"], ["c", "c", ""]),
        ("balanced", ["c", "t"], ["", "t"]),  # a tie
        ("balanced", ["c", "t", ""], ["", "t", ""]),  # the idle one has no vote
        ("balanced", ["c", "t", "ct", "", ""], ["c", "", "c", "", ""]),
        ("balanced", ["ct"], ["c"]),
    ],
)
@pytest.mark.conformance(50)
def test_a_strategy_decides_which_kind_is_computed_and_where(
    strategy: SchedulingStrategy, queues: list[str], batches: list[str]
) -> None:
    assert Play(*queues, strategy=strategy).next() == batches


@pytest.mark.parametrize(
    ("strategy", "queues", "batches"),
    [
        ("prefill_first", ["ttc"], ["ctt"]),
        ("decode_first", ["ttc"], ["ttc"]),
        ("balanced", ["ttc", "c"], ["ttc", "c"]),
        ("per_replica", ["ttc", "c", "t", ""], ["ttc", "c", "t", ""]),
        ("decode_first", ["c", "t", ""], ["c", "t", ""]),
    ],
)
@pytest.mark.conformance(50)
def test_with_in_flight_batching_the_other_kind_fills_what_is_left(
    strategy: SchedulingStrategy, queues: list[str], batches: list[str]
) -> None:
    assert Play(*queues, strategy=strategy, in_flight=True).next() == batches


def test_in_flight_what_comes_first_takes_the_tokens_it_needs() -> None:
    play = Play("tttccc", strategy="decode_first", in_flight=True, max_batch_input_tokens=10, max_batch_size=8)
    assert play.next() == ["tttcc"]  # 3 + 6 + 1
    play = Play("tttccc", strategy="prefill_first", in_flight=True, max_batch_input_tokens=10, max_batch_size=8)
    assert play.next() == ["cc"]  # 6 + 4: the cut closes the batch


def test_in_flight_a_prompt_has_to_fit_beside_the_sequences_context() -> None:
    play = Play("ttc", strategy="decode_first", in_flight=True, max_batch_total_tokens=16)
    assert play.next() == ["ttc"]  # 4 + 4 + 8
    play = Play("tttc", strategy="decode_first", in_flight=True, max_batch_total_tokens=16)
    assert play.next() == ["ttt"]


@pytest.mark.parametrize("strategy", ["prefill_first", "balanced", "per_replica"])
@pytest.mark.conformance(51)
def test_under_pressure_on_the_pool_sequences_come_first(strategy: SchedulingStrategy) -> None:
    play = Play("ct", strategy=strategy, num_blocks=10)
    play.press(0, 9)
    assert play.next() == ["c"], "nine of ten blocks are not more than 0.9"
    play = Play("ct", strategy=strategy, num_blocks=10)
    play.press(0, 10)
    assert play.next() == ["t"]
    play = Play("c", strategy=strategy, num_blocks=10)
    play.press(0, 10)
    assert play.next() == ["c"], "there is nothing else to compute"


def test_pressure_is_a_replicas_own_and_where_it_is_high_can_be_configured() -> None:
    play = Play("ct", "ct", strategy="per_replica", num_blocks=10, kv_pressure_fraction=0.5)
    play.press(1, 6)
    assert play.next() == ["c", "t"]


@pytest.mark.parametrize(
    ("strategy", "queues", "passed_over", "instead"),
    [
        ("decode_first", ["ct"], ["t"], ["c"]),
        ("prefill_first", ["ct"], ["c"], ["t"]),
        ("per_replica", ["ct", "t"], ["c", "t"], ["t", "t"]),
        ("balanced", ["t", "t", "c"], ["t", "t", ""], ["", "", "c"]),
        ("prefill_first", ["t", "c"], ["", "c"], ["t", ""]),
    ],
)
@pytest.mark.conformance(50)
def test_what_was_passed_over_often_enough_comes_first_once(
    strategy: SchedulingStrategy, queues: list[str], passed_over: list[str], instead: list[str]
) -> None:
    play = Play(*queues, strategy=strategy, max_passed_over_steps=3)
    assert [play.next() for _ in range(8)] == [*[passed_over] * 3, instead, *[passed_over] * 3, instead]


def test_what_was_passed_over_and_is_gone_holds_nobody_up() -> None:
    for strategy in STRATEGIES[1:]:
        play = Play("tct", strategy=strategy, kv_pressure_fraction=0.0, max_passed_over_steps=2)
        play.press(0, 1)
        assert [play.next() for _ in range(2)] == [["tt"]] * 2
        replica = play.replicas[0]
        replica.move(replica.prompts[0], Stage.PROMPT, None)
        assert play.next() == ["tt"], strategy


def test_a_prompt_that_never_fits_beside_the_sequences_gets_a_step_where_it_comes_first() -> None:
    play = Play("tttc", strategy="decode_first", in_flight=True, max_batch_total_tokens=16, max_passed_over_steps=2)
    assert [play.next() for _ in range(3)] == [["ttt"], ["ttt"], ["ctt"]]


# --- order -----------------------------------------------------------------------------------------------------------


def test_a_cut_prompt_stays_first_whatever_arrived_before_it() -> None:
    play = Play("", strategy="prefill_first", max_batch_input_tokens=8)
    replica = play.replicas[0]
    long, later, earlier = Job(prompt(20).context, 5), Job(prompt(6).context, 7), Job(prompt(6).context, 3)
    replica.move(long, None, Stage.PROMPT)
    assert play.next() == ["c"] and replica.begun is long
    replica.move(later, None, Stage.PROMPT)
    replica.move(earlier, None, Stage.PROMPT)
    assert list(replica.prompts) == [long, earlier, later]
    replica.check()
    replica.move(long, Stage.PROMPT, None)
    assert replica.begun is None and list(replica.prompts) == [earlier, later]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_configured_wins_over_what_suits_the_node(strategy: SchedulingStrategy) -> None:
    config = canary_config(scheduling_strategy=strategy, enable_in_flight_batching=False)
    policy = Policy.of(config, strategy="per_replica", in_flight=True)
    assert (policy.strategy, policy.in_flight) == (strategy, False)
    left_open = Policy.of(canary_config(), strategy="per_replica", in_flight=True)
    assert (left_open.strategy, left_open.in_flight) == ("per_replica", True)
