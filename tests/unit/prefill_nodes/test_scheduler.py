"""The prefill scheduler, stepped by hand over the canary, which checks every block that it reads."""

import pytest

from pipelines.runtime.messages import Admit, ChunkReady, Failed, FirstToken, Prefill, Release, ResetPrefixCache
from pipelines.types.text_context import TextContext
from prefill_nodes.prompt import TRANSITIONS, Event, State
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.errors import InternalError
from pronghorn.ids import Fence, RequestID
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import continuation, expected_block
from tests.fakes.engine_play import EnginePlay, fence

BUDGET_S = 60.0


def play(**changes: object) -> EnginePlay:
    return EnginePlay(canary_config(**changes), PrefillScheduler)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def prefill(
    engine: EnginePlay,
    name: str,
    context: TextContext,
    wanted: list[int] | None = None,
    *,
    budget_s: float = BUDGET_S,
    attempt: int = 1,
) -> Fence:
    context.request_id = RequestID(name)
    blocks = -(-len(context.tokens) // engine.config.block_tokens)
    asked = list(range(blocks)) if wanted is None else wanted
    engine.send(Prefill(fence(name, attempt), context, asked, budget_s))
    return fence(name, attempt)


def ready_blocks(engine: EnginePlay, of: Fence) -> dict[int, int]:
    """Reported so far, block id by position; none twice."""
    reports = [event for event in engine.events if isinstance(event, ChunkReady) and event.fence == of]
    pairs = [pair for report in reports for pair in zip(report.positions, report.block_ids, strict=True)]
    assert len({position for position, _ in pairs}) == len(pairs), f"a position was reported twice: {pairs}"
    return dict(pairs)


def assert_readable(engine: EnginePlay, of: Fence, prompt: list[int]) -> None:
    for position, block in ready_blocks(engine, of).items():
        data = expected_block(prompt, position, engine.config.block_tokens)
        assert bytes(engine.memory.block(block)[: len(data)]) == data, f"block at position {position}"


def failure_kind(engine: EnginePlay, of: Fence) -> str:
    word = engine.last_word_of(of)
    assert isinstance(word, Failed)
    return word.error.kind


def at_rest(engine: EnginePlay) -> bool:
    load = engine.scheduler.load()
    return load.held_blocks == load.waiting == load.running == load.awaiting_blocks == 0


# --- what is reported, and when --------------------------------------------------------------------------------------


def test_each_chunks_blocks_are_reported_when_they_are_complete_and_stay_until_release() -> None:
    engine, prompt = play(), prompt_of(38)
    one = prefill(engine, "one", canary_context(prompt))
    for blocks in (4, 8, 10):
        engine.step()
        assert sorted(ready_blocks(engine, one)) == list(range(blocks))
        assert_readable(engine, one, prompt)
    assert engine.only(FirstToken).token == continuation(prompt, 1)[0]
    assert engine.step() is None
    assert engine.scheduler.load().held_blocks == 10 and engine.scheduler.load().awaiting_blocks == 1
    engine.send(Release(one))
    assert at_rest(engine)


@pytest.mark.conformance(47)
def test_the_first_token_leaves_before_the_last_blocks_of_the_same_step() -> None:
    engine = play()
    prefill(engine, "one", canary_context(prompt_of(14)))
    events = engine.step()
    assert events is not None and [type(event) for event in events] == [FirstToken, ChunkReady]


def test_only_wanted_positions_are_reported() -> None:
    engine, prompt = play(), prompt_of(30)
    one = prefill(engine, "one", canary_context(prompt), [3, 7])
    engine.run()
    assert sorted(ready_blocks(engine, one)) == [3, 7]
    assert_readable(engine, one, prompt)


def test_what_is_cached_here_is_reported_at_once_and_not_computed() -> None:
    engine, prompt = play(), prompt_of(20)
    engine.send(Release(prefill(engine, "warm", canary_context(prompt))))
    warm = prefill(engine, "warm-2", canary_context(prompt))
    engine.run()
    engine.send(Release(warm))
    computed = engine.pipeline.computed_tokens
    one = prefill(engine, "one", canary_context(prompt), [1, 2, 4])
    assert sorted(ready_blocks(engine, one)) == [1, 2], "before any step"
    engine.run()
    assert sorted(ready_blocks(engine, one)) == [1, 2, 4]
    assert_readable(engine, one, prompt)
    assert engine.pipeline.computed_tokens - computed == 4


def test_a_context_that_comes_with_the_decode_nodes_window_is_computed_from_its_start() -> None:
    engine, prompt = play(), prompt_of(14)
    context = canary_context(prompt)
    context.tokens.skip_processing(8)
    context.cached_prefix_length = 8
    one = prefill(engine, "one", context)
    engine.run()
    assert_readable(engine, one, prompt)
    assert engine.pipeline.computed_tokens == 14
    assert engine.only(FirstToken).token == continuation(prompt, 1)[0]


def test_log_probabilities_travel_with_the_first_token() -> None:
    engine, context = play(), canary_context(prompt_of(5))
    context.log_probabilities = 1
    prefill(engine, "one", context)
    engine.run()
    first = engine.only(FirstToken)
    assert first.log_probabilities is not None and first.log_probabilities.sampled_token_ids == [first.token]


# --- batching and room -----------------------------------------------------------------------------------------------


@pytest.mark.conformance(50)
def test_short_prompts_share_a_step_and_a_long_one_fills_the_rest() -> None:
    engine = play()
    for name, prompt in (("a", prompt_of(5)), ("b", prompt_of(6, 50)), ("c", prompt_of(40, 100))):
        prefill(engine, name, canary_context(prompt))
    engine.step()
    assert [context.request_id.value for context in engine.batches[0].flat_batch] == ["a", "b", "c"]
    assert engine.batches[0].input_tokens == 16
    engine.run()
    assert {e.fence.request_id.value for e in engine.events if isinstance(e, FirstToken)} == {"a", "b", "c"}
    assert_readable(engine, fence("c"), prompt_of(40, 100))


def test_prompts_wait_for_blocks_in_order_and_get_those_that_are_released() -> None:
    engine = play(num_blocks=8)
    first = prefill(engine, "first", canary_context(prompt_of(20)))
    prefill(engine, "long", canary_context(prompt_of(24, 100)))
    prefill(engine, "short", canary_context(prompt_of(2, 200)))
    engine.run()
    assert engine.only(FirstToken).fence == first, "the short one must not overtake"
    engine.send(Release(first))
    engine.run()
    assert [e.fence.request_id.value for e in engine.events if isinstance(e, FirstToken)] == ["first", "long", "short"]


def test_a_prompt_that_can_never_fit_fails_at_once_with_both_numbers() -> None:
    engine = play(num_blocks=4)
    prefill(engine, "fits", canary_context(prompt_of(16)))
    one = prefill(engine, "one", canary_context(prompt_of(17)))
    word = engine.last_word_of(one)
    assert isinstance(word, Failed) and word.error.kind == "InsufficientBlocks"
    assert "needs 5 blocks" in word.error.message and "the whole pool has 4" in word.error.message


@pytest.mark.parametrize("wanted", [[], [2, 1], [0, 0], [4]])
def test_positions_that_the_prompt_does_not_have_are_refused(wanted: list[int]) -> None:
    engine = play()
    one = prefill(engine, "one", canary_context(prompt_of(16)), wanted)
    assert failure_kind(engine, one) == "InvalidRequest"
    assert at_rest(engine)


def test_one_prompt_too_many_is_refused_as_overload() -> None:
    engine = play(num_blocks=4, max_waiting=1)
    for name in ("held", "waits"):
        prefill(engine, name, canary_context(prompt_of(12)))
    assert failure_kind(engine, prefill(engine, "refused", canary_context(prompt_of(1)))) == "Overloaded"


# --- ends ------------------------------------------------------------------------------------------------------------


def test_the_deadline_ends_those_that_wait_and_keeps_blocks_that_may_be_read() -> None:
    engine = play(num_blocks=8)
    reading = prefill(engine, "reading", canary_context(prompt_of(32)), budget_s=1.0)
    waiting = prefill(engine, "waiting", canary_context(prompt_of(8, 100)), budget_s=2.0)
    engine.step()
    engine.sweep(1.0)
    assert failure_kind(engine, reading) == "DeadlineExceeded"
    assert engine.scheduler.load().held_blocks == 8
    engine.sweep(1.0)
    assert failure_kind(engine, waiting) == "DeadlineExceeded"
    engine.send(Release(waiting))
    assert engine.scheduler.load().held_blocks == 8
    assert engine.step() is None, "a prompt that has failed is not computed further"
    engine.send(Release(reading))
    assert at_rest(engine)


def test_before_any_block_is_reported_a_failure_frees_at_once() -> None:
    engine = play()
    one = prefill(engine, "one", canary_context(prompt_of(40)), [9], budget_s=1.0)
    engine.step()
    engine.sweep(1.0)
    assert failure_kind(engine, one) == "DeadlineExceeded"
    assert at_rest(engine)


@pytest.mark.conformance(45)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_release_frees_at_once_in_any_state(steps: int) -> None:
    engine = play()
    one = prefill(engine, "one", canary_context(prompt_of(40)))
    for _ in range(steps):
        engine.step()
    engine.send(Release(one), Release(one), ResetPrefixCache())
    assert engine.step() is None and at_rest(engine)
    assert engine.scheduler.take_ended() == [one.request_id]


def test_a_failure_of_one_prompt_leaves_the_others_alone() -> None:
    engine = play()
    bad = prefill(engine, "bad", canary_context(prompt_of(6)))
    good = prefill(engine, "good", canary_context(prompt_of(6, 50)))
    engine.pipeline.fail_with[bad.request_id] = InternalError("its logits are not finite")
    engine.run()
    assert failure_kind(engine, bad) == "InternalError"
    assert engine.only(FirstToken).fence == good
    engine.send(Release(good))
    assert at_rest(engine)


def test_a_newer_attempt_replaces_the_older_whose_blocks_wait_for_release() -> None:
    engine, prompt = play(), prompt_of(30)
    old = prefill(engine, "one", canary_context(prompt))
    engine.step()
    new = prefill(engine, "one", canary_context(prompt), attempt=2)
    assert failure_kind(engine, old) == "Cancelled"
    late = prefill(engine, "one", canary_context(prompt), attempt=0)
    assert failure_kind(engine, late) == "Cancelled"
    assert engine.send(Prefill(new, canary_context(prompt, request_id="one"), [0], BUDGET_S)) == []
    engine.run()
    assert engine.only(FirstToken).fence == new
    assert_readable(engine, new, prompt)
    assert_readable(engine, old, prompt)
    engine.send(Release(old), Release(new))
    assert at_rest(engine)


def test_a_decode_nodes_command_is_a_mistake_of_the_shell() -> None:
    with pytest.raises(ValueError, match="Admit is no command for a prefill scheduler"):
        play().send(Admit(fence("one"), canary_context([1]), BUDGET_S))


def test_release_is_possible_in_every_state_but_the_end() -> None:
    assert {state for state, event in TRANSITIONS if event is Event.RELEASE} == set(State) - {State.GONE}
