"""The decode scheduler, stepped by hand over the canary, which checks every block that it reads."""

from collections.abc import Sequence

import pytest

from decode_nodes.scheduler import DecodeScheduler
from decode_nodes.sequence import RUNNING, TRANSITIONS, Event, State
from pipelines.runtime.messages import (
    Admit,
    Adopt,
    Failed,
    Prefill,
    PrefillHere,
    Release,
    Reserved,
    ResetPrefixCache,
    TokenDelta,
)
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pronghorn.errors import InternalError
from pronghorn.ids import Fence, RequestID
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

BUDGET_S = 60.0


def play(**changes: object) -> EnginePlay:
    return EnginePlay(canary_config(**changes), DecodeScheduler)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def admit(
    engine: EnginePlay, name: str, context: TextContext, *, here: bool = False, budget_s: float = BUDGET_S
) -> Fence:
    context.request_id = RequestID(name)
    engine.send(Admit(fence(name), context, budget_s, prefill_here=here))
    return fence(name)


def pull(engine: EnginePlay, reserved: Reserved, prompt: Sequence[int]) -> None:
    """Write the wanted blocks, as the shell does."""
    blocks = {p: block for p, block in enumerate(reserved.block_ids) if p >= reserved.cached_blocks}
    write_blocks(engine.memory, engine.config.block_tokens, prompt, blocks)


def failure_kind(engine: EnginePlay, of: Fence) -> str:
    word = engine.last_word_of(of)
    assert isinstance(word, Failed)
    return word.error.kind


def at_rest(engine: EnginePlay) -> bool:
    load = engine.scheduler.load()
    return load.held_blocks == load.waiting == load.running == load.awaiting_blocks == 0


# --- pulling ---------------------------------------------------------------------------------------------------------


def test_a_pulled_prompt_goes_on_behind_the_delivered_token_and_does_not_repeat_it() -> None:
    engine, prompt = play(), prompt_of(10)
    first, *rest = continuation(prompt, 6)
    one = admit(engine, "one", canary_context(prompt, 6))
    reserved = engine.only(Reserved)
    assert len(reserved.block_ids) == 3 and reserved.cached_blocks == 0
    assert engine.step() is None, "nothing is computed before the blocks are there"
    pull(engine, reserved, prompt)
    engine.send(Adopt(one, first))
    engine.run()
    assert engine.tokens_of(one) == rest
    last = engine.last_word_of(one)
    assert isinstance(last, TokenDelta) and last.status is GenerationStatus.MAXIMUM_LENGTH
    assert engine.pipeline.computed_tokens == 5, "the prompt was not computed again"
    assert at_rest(engine)


@pytest.mark.conformance(43)
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_reserved_names_the_prompts_own_blocks_and_no_block_beyond(length: int) -> None:
    engine = play()
    admit(engine, "one", canary_context(prompt_of(length)))
    assert len(engine.only(Reserved).block_ids) == -(-length // 4)


@pytest.mark.conformance(43)
def test_what_is_cached_here_is_not_pulled_and_is_reported_with_the_first_delta() -> None:
    engine, prompt = play(), prompt_of(12)
    admit(engine, "warm", canary_context(prompt, 2), here=True)
    engine.run()
    one = admit(engine, "one", canary_context(prompt, 4))
    reserved = engine.only(Reserved)
    assert reserved.cached_blocks == 2, "the last token is never reusable, so the third block is pulled"
    first, *rest = continuation(prompt, 4)
    pull(engine, reserved, prompt)
    engine.send(Adopt(one, first))
    deltas = [event for event in engine.run() if isinstance(event, TokenDelta)]
    assert [delta.num_cached_tokens for delta in deltas] == [8, None, None]
    assert engine.tokens_of(one) == rest


@pytest.mark.parametrize("word", [Adopt, PrefillHere])
@pytest.mark.parametrize("ending", ["end_of_sequence", "maximum_length"])
def test_a_first_token_that_is_the_last_ends_the_sequence_without_a_step(
    ending: str, word: type[Adopt] | type[PrefillHere]
) -> None:
    engine, prompt = play(), prompt_of(6)
    (first,) = continuation(prompt, 1)
    eos, room = ([first], 5) if ending == "end_of_sequence" else ([], 1)
    one = admit(engine, "one", canary_context(prompt, room, eos=eos))
    engine.send(word(one, first))
    last = engine.last_word_of(one)
    assert isinstance(last, TokenDelta)
    assert (last.tokens, last.status, last.num_cached_tokens) == ([], GenerationStatus(ending), 0)
    assert engine.step() is None
    assert at_rest(engine)


def test_after_a_failed_pull_the_prompt_is_computed_here_and_the_delivered_token_stays() -> None:
    engine, prompt = play(), prompt_of(22)
    first, *rest = continuation(prompt, 5)
    one = admit(engine, "one", canary_context(prompt, 5))
    engine.send(PrefillHere(one, first))
    engine.run()
    assert engine.tokens_of(one) == rest
    assert at_rest(engine)


def test_a_delivered_token_that_differs_from_ours_is_kept() -> None:
    engine, prompt = play(), prompt_of(5)
    delivered = (continuation(prompt, 1)[0] + 1) % VOCAB_SIZE
    one = admit(engine, "one", canary_context(prompt, 4))
    engine.send(PrefillHere(one, delivered))
    engine.run()
    assert engine.tokens_of(one) == continuation([*prompt, delivered], 3)


def test_a_failed_pull_without_a_token_samples_the_first_one_here_and_keeps_the_cached_prefix() -> None:
    engine, prompt = play(), prompt_of(22)
    admit(engine, "warm", canary_context(prompt[:9], 1), here=True)
    engine.run()
    computed = engine.pipeline.computed_tokens
    one = admit(engine, "one", canary_context(prompt, 5))
    engine.send(PrefillHere(one))
    engine.run()
    assert engine.tokens_of(one) == continuation(prompt, 5)
    assert engine.pipeline.computed_tokens - computed == (22 - 8) + 4


@pytest.mark.parametrize("delivered", [False, True])
def test_what_was_fetched_after_a_failed_pull_is_a_hit_and_only_the_rest_is_computed(delivered: bool) -> None:
    engine, prompt = play(), prompt_of(22)
    first, *rest = continuation(prompt, 5)
    one = admit(engine, "one", canary_context(prompt, 5))
    reserved = engine.only(Reserved)
    write_blocks(engine.memory, 4, prompt, {p: reserved.block_ids[p] for p in range(3)})
    engine.send(PrefillHere(one, first if delivered else None, fetched_blocks=3))
    deltas = [event for event in engine.run() if isinstance(event, TokenDelta)]
    assert engine.tokens_of(one) == (rest if delivered else [first, *rest])
    assert deltas[0].num_cached_tokens == 12
    assert engine.pipeline.computed_tokens == (22 - 12) + 4
    assert at_rest(engine)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_delivered_token_outside_the_vocabulary_fails_the_request_and_nobody_else(token: int) -> None:
    engine = play()
    one = admit(engine, "one", canary_context(prompt_of(6)))
    engine.send(Adopt(one, token))
    assert failure_kind(engine, one) == "TransferFailed"
    assert at_rest(engine)


def test_late_words_about_unknown_or_changed_sequences_are_harmless() -> None:
    engine, prompt = play(), prompt_of(6)
    unknown = fence("nobody")
    assert engine.send(Adopt(unknown, 1), PrefillHere(unknown, 1), Release(unknown), ResetPrefixCache()) == []
    one = admit(engine, "one", canary_context(prompt, 3), here=True)
    engine.send(Adopt(one, 5), PrefillHere(one, 5))
    engine.run()
    assert engine.tokens_of(one) == continuation(prompt, 3)


def test_a_prefill_command_is_a_mistake_of_the_shell() -> None:
    with pytest.raises(ValueError, match="Prefill is no command for a decode scheduler"):
        play().send(Prefill(fence("one"), canary_context([1]), [0], BUDGET_S))


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_fails_at_once_with_both_numbers() -> None:
    engine = play(num_blocks=4)
    one = admit(engine, "one", canary_context(prompt_of(16)))
    word = engine.last_word_of(one)
    assert isinstance(word, Failed) and word.error.kind == "InsufficientBlocks"
    assert "needs 5 blocks" in word.error.message and "the whole pool has 4" in word.error.message
    assert at_rest(engine)


def test_requests_wait_for_blocks_in_order_of_arrival() -> None:
    engine = play(num_blocks=8)
    first = admit(engine, "first", canary_context(prompt_of(24)))
    admit(engine, "long", canary_context(prompt_of(20, 100)))
    admit(engine, "short", canary_context(prompt_of(2, 200)))
    assert engine.only(Reserved).fence == first, "the short one must not overtake"
    assert engine.scheduler.load().waiting == 2
    events = engine.send(Release(first))
    assert [event.fence.request_id.value for event in events] == ["long", "short"]


def test_one_request_too_many_is_refused_as_overload() -> None:
    engine = play(num_blocks=4, max_waiting=2)
    for name in ("held", "waits-1", "waits-2"):
        admit(engine, name, canary_context(prompt_of(12)))
    refused = admit(engine, "refused", canary_context(prompt_of(1)))
    word = engine.last_word_of(refused)
    assert isinstance(word, Failed) and word.error.kind == "Overloaded" and word.error.retry_after_s is not None
    assert engine.scheduler.load().waiting == 2


def test_slots_are_bounded_by_the_batch_size_and_pulled_sequences_take_one() -> None:
    engine = play(max_batch_size=2)
    fences = [admit(engine, f"r{i}", canary_context(prompt_of(3, 10 * i + 1))) for i in range(3)]
    assert [event.fence for event in engine.events] == fences[:2]
    assert engine.send(Release(fences[0]))[0].fence == fences[2]


@pytest.mark.conformance(46)
def test_the_deadline_ends_those_that_wait_and_those_that_run() -> None:
    engine = play(num_blocks=8)
    running = admit(engine, "running", canary_context(prompt_of(20), 50), here=True, budget_s=5.0)
    waiting = admit(engine, "waiting", canary_context(prompt_of(20, 50)), budget_s=4.0)
    engine.step()
    assert engine.sweep(3.9) == []
    engine.sweep(0.1)
    assert failure_kind(engine, waiting) == "DeadlineExceeded"
    engine.sweep(1.0)
    assert failure_kind(engine, running) == "DeadlineExceeded"
    assert at_rest(engine)


@pytest.mark.field("vllm#55470")
@pytest.mark.conformance(48)
def test_blocks_under_a_pull_outlive_the_deadline_until_the_shell_lets_go() -> None:
    engine = play(num_blocks=4)
    pulled = admit(engine, "pulled", canary_context(prompt_of(12)), budget_s=1.0)
    waiting = admit(engine, "waiting", canary_context(prompt_of(12, 50)))
    engine.sweep(1.0)
    assert failure_kind(engine, pulled) == "DeadlineExceeded"
    assert engine.scheduler.load().held_blocks == 4 and engine.scheduler.load().awaiting_blocks == 1
    assert engine.send(Adopt(pulled, 1)) == [] and engine.sweep(1.0) == []
    assert engine.send(Release(pulled))[0].fence == waiting


# --- continuous batching ---------------------------------------------------------------------------------------------


@pytest.mark.conformance(50)
def test_a_long_local_prompt_does_not_stall_running_streams() -> None:
    engine = play()
    stream = admit(engine, "stream", canary_context(prompt_of(3), 40), here=True)
    engine.step()
    admit(engine, "long", canary_context(prompt_of(90, 100), 2), here=True)
    for _ in range(6):
        said = len(engine.tokens_of(stream))
        engine.step()
        assert len(engine.tokens_of(stream)) == said + 1
        assert engine.batches[-1].input_tokens == 16
    engine.run()
    assert engine.tokens_of(stream) == continuation(prompt_of(3), 40)
    assert engine.tokens_of(fence("long")) == continuation(prompt_of(90, 100), 2)


@pytest.mark.conformance(50)
def test_several_prompts_and_streams_share_a_step_within_the_budget() -> None:
    engine = play()
    for i in range(5):
        admit(engine, f"r{i}", canary_context(prompt_of(6, 20 * i + 1), 6), here=True)
    engine.step()
    assert [c.request_id.value for c in engine.batches[0].flat_batch] == ["r0", "r1", "r2"]
    engine.run()
    for i in range(5):
        assert engine.tokens_of(fence(f"r{i}")) == continuation(prompt_of(6, 20 * i + 1), 6)
    assert at_rest(engine)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    engine, prompt = play(), prompt_of(6)
    admit(engine, "turn-1", canary_context(prompt, 7), here=True)
    engine.run()
    conversation = [*prompt, *continuation(prompt, 7), 7, 7]
    second = admit(engine, "turn-2", canary_context(conversation, 1), here=True)
    engine.run()
    last = engine.last_word_of(second)
    assert isinstance(last, TokenDelta) and last.num_cached_tokens == 12


@pytest.mark.conformance(33)
def test_salts_do_not_share_and_caching_can_be_off() -> None:
    engine, prompt = play(), prompt_of(12)
    admit(engine, "a", canary_context(prompt, 1, salt="tenant-a"), here=True)
    engine.run()
    admit(engine, "b", canary_context(prompt, 1, salt="tenant-b"))
    assert engine.only(Reserved).cached_blocks == 0
    uncached = play(enable_prefix_caching=False)
    admit(uncached, "a", canary_context(prompt, 1), here=True)
    uncached.run()
    admit(uncached, "b", canary_context(prompt, 1))
    assert uncached.only(Reserved).cached_blocks == 0


def test_a_reset_cache_is_forgotten() -> None:
    engine, prompt = play(), prompt_of(12)
    admit(engine, "a", canary_context(prompt, 1), here=True)
    engine.run()
    engine.send(ResetPrefixCache())
    admit(engine, "b", canary_context(prompt, 1))
    assert engine.only(Reserved).cached_blocks == 0


# --- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.conformance(51)
@pytest.mark.parametrize("caching", [True, False])
def test_when_blocks_run_out_the_newest_starts_over_and_no_token_is_lost_or_repeated(caching: bool) -> None:
    engine = play(num_blocks=12, enable_prefix_caching=caching)
    fences = [admit(engine, f"r{i}", canary_context(prompt_of(7, 50 * i + 1), 24), here=True) for i in range(4)]
    engine.run()
    for i, one in enumerate(fences):
        assert engine.tokens_of(one) == continuation(prompt_of(7, 50 * i + 1), 24)
        assert isinstance(engine.last_word_of(one), TokenDelta)
    sizes = [batch.batch_size for batch in engine.batches]
    assert any(later < earlier for earlier, later in zip(sizes, sizes[1:], strict=False)), "nobody was preempted"
    assert at_rest(engine)


@pytest.mark.conformance(51)
def test_the_oldest_is_never_preempted() -> None:
    engine = play(num_blocks=12)
    oldest = admit(engine, "oldest", canary_context(prompt_of(7), 30), here=True)
    admit(engine, "newer", canary_context(prompt_of(7, 100), 30), here=True)
    said = 0
    engine.step()
    while said < 30:
        assert len(engine.tokens_of(oldest)) == said + 1
        said += 1
        engine.step()


@pytest.mark.field("vllm#55470")
@pytest.mark.conformance(48)
def test_blocks_under_a_pull_are_never_taken() -> None:
    engine = play(num_blocks=8)
    grower = admit(engine, "grower", canary_context(prompt_of(7), 20), here=True)
    prompt = prompt_of(15, 100)
    pulled = admit(engine, "pulled", canary_context(prompt, 2))
    reserved = engine.only(Reserved)
    engine.run()
    assert engine.scheduler.load().waiting == 1, "the grower gave way, since it is all that can"
    pull(engine, reserved, prompt)
    first, second = continuation(prompt, 2)
    engine.send(Adopt(pulled, first))
    engine.run()
    assert engine.tokens_of(pulled) == [second]
    assert engine.tokens_of(grower) == continuation(prompt_of(7), 20)
    assert at_rest(engine)


def test_a_sequence_that_outgrows_the_whole_pool_fails_with_what_it_said_delivered() -> None:
    engine = play(num_blocks=4)
    one = admit(engine, "one", canary_context(prompt_of(8), 40), here=True)
    engine.run()
    assert failure_kind(engine, one) == "InsufficientBlocks"
    assert engine.tokens_of(one) == continuation(prompt_of(8), 9)
    assert at_rest(engine)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["waiting", "pulling", "prefilling", "decoding"])
def test_release_frees_at_once_in_any_state(moment: str) -> None:
    engine = play(num_blocks=12, max_batch_size=1)
    if moment == "waiting":
        admit(engine, "first", canary_context(prompt_of(3)))
    one = admit(engine, "one", canary_context(prompt_of(30, 100), 9), here=moment in ("prefilling", "decoding"))
    for _ in range({"prefilling": 1, "decoding": 3}.get(moment, 0)):
        engine.step()
    engine.send(Release(one))
    if moment == "waiting":
        engine.send(Release(fence("first")))
    assert engine.step() is None and at_rest(engine)
    assert one.request_id in engine.scheduler.take_ended()


def test_a_failure_of_one_request_leaves_the_others_alone() -> None:
    engine = play()
    good = admit(engine, "good", canary_context(prompt_of(6), 5), here=True)
    bad = admit(engine, "bad", canary_context(prompt_of(6, 50), 5), here=True)
    engine.step()
    engine.pipeline.fail_with[bad.request_id] = InternalError("its logits are not finite")
    engine.run()
    assert failure_kind(engine, bad) == "InternalError"
    assert engine.tokens_of(good) == continuation(prompt_of(6), 5)
    assert at_rest(engine)


def test_a_newer_attempt_replaces_the_older_whose_blocks_wait_for_release() -> None:
    engine, prompt = play(), prompt_of(6)
    old, new = fence("one", attempt=1), fence("one", attempt=2)
    engine.send(Admit(old, canary_context(prompt, 3, request_id="one"), BUDGET_S))
    engine.send(Admit(new, canary_context(prompt, 3, request_id="one"), BUDGET_S, prefill_here=True))
    assert failure_kind(engine, old) == "Cancelled"
    assert engine.scheduler.load().awaiting_blocks == 1
    engine.run()
    assert engine.tokens_of(new) == continuation(prompt, 3)
    assert engine.scheduler.load().held_blocks == 2
    engine.send(Release(old))
    assert at_rest(engine)


def test_an_older_attempt_is_refused_and_the_same_one_again_is_ignored() -> None:
    engine, prompt = play(), prompt_of(6)
    new, old = fence("one", attempt=2), fence("one", attempt=1)
    engine.send(Admit(new, canary_context(prompt, 3, request_id="one"), BUDGET_S, prefill_here=True))
    engine.send(Admit(old, canary_context(prompt, 3, request_id="one"), BUDGET_S))
    assert engine.send(Admit(new, canary_context(prompt, 3, request_id="one"), BUDGET_S)) == []
    assert failure_kind(engine, old) == "Cancelled"
    engine.run()
    assert engine.tokens_of(new) == continuation(prompt, 3)


def test_every_state_can_be_left_and_release_is_possible_in_all_but_the_end() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.GONE}
    assert {state for state, event in TRANSITIONS if event is Event.RELEASE} == set(State) - {State.GONE}
    assert {state for state, event in TRANSITIONS if event is Event.PREEMPT} == RUNNING
