"""Requests for several choices on the decode scheduler, over the canary, which checks every block that it reads."""

import pytest

from decode_nodes.scheduler import DecodeScheduler
from pipelines.runtime.messages import Admit, Adopt, Failed, PrefillHere, Release, Reserved, TokenDelta
from pipelines.types.sampled_token import SampledToken
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pronghorn.errors import InternalError
from pronghorn.ids import Fence, RequestID
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import VOCAB_SIZE, continuation, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

PROMPT = list(range(1, 11))
FIRST = continuation(PROMPT, 1)[0]


def expected(choice: int, new_tokens: int) -> list[int]:
    first = (FIRST + choice) % VOCAB_SIZE
    return [first, *continuation([*PROMPT, first], new_tokens - 1)]


def play(**changes: object) -> EnginePlay:
    return EnginePlay(canary_config(**changes), DecodeScheduler)


def admit(engine: EnginePlay, choices: int, new_tokens: int = 6, *, here: bool = False, **more: object) -> Fence:
    context: TextContext = canary_context(PROMPT, new_tokens, **more)  # type: ignore[arg-type]
    context.request_id, context.num_choices = RequestID("r"), choices
    engine.send(Admit(fence("r"), context, 60.0, prefill_here=here))
    return fence("r")


def adopt(engine: EnginePlay, one: Fence, choices: int) -> None:
    reserved = engine.only(Reserved)
    wanted = {p: block for p, block in enumerate(reserved.block_ids) if p >= reserved.cached_blocks}
    write_blocks(engine.memory, engine.config.block_tokens, PROMPT, wanted)
    engine.send(Adopt(one, FIRST, None, [SampledToken((FIRST + i) % VOCAB_SIZE) for i in range(1, choices)]))


def said(engine: EnginePlay, choice: int) -> list[int]:
    deltas = [event for event in engine.events if isinstance(event, TokenDelta) and event.choice == choice]
    assert {delta.fence for delta in deltas} == {fence("r")}
    assert [delta.status.is_done for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return [token for delta in deltas for token in delta.tokens]


def at_rest(engine: EnginePlay) -> bool:
    load = engine.scheduler.load()
    return load.held_blocks == load.waiting == load.running == load.awaiting_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_one_prefill_serves_every_choice(caching: bool) -> None:
    engine = play(enable_prefix_caching=caching)
    admit(engine, 3, here=True)
    engine.run()
    for choice in range(3):
        assert said(engine, choice) == expected(choice, 6)
    assert engine.pipeline.computed_tokens == len(PROMPT) + 3 * 5
    assert at_rest(engine)


def test_one_pull_serves_every_choice() -> None:
    engine = play()
    one = admit(engine, 3)
    adopt(engine, one, 3)
    engine.run()
    for choice in range(3):
        assert said(engine, choice) == expected(choice, 6)[1:], "first tokens were delivered by the shell"
    assert engine.pipeline.computed_tokens == 3 * 5
    assert at_rest(engine)


def test_after_a_failed_pull_delivered_first_tokens_stay() -> None:
    engine = play()
    one = admit(engine, 3)
    engine.send(PrefillHere(one, FIRST, None, [SampledToken((FIRST + i) % VOCAB_SIZE) for i in (1, 2)]))
    engine.run()
    for choice in range(3):
        assert said(engine, choice) == expected(choice, 6)[1:]
    assert at_rest(engine)


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("changes", [{"max_batch_size": 1}, {"max_batch_size": 2}, {"num_blocks": 6}])
def test_choices_that_find_no_room_wait_for_it(changes: dict[str, object], here: bool) -> None:
    engine = play(**changes)
    one = admit(engine, 4, 9, here=here)
    if not here:
        adopt(engine, one, 4)
    engine.run()
    for choice in range(4):
        assert said(engine, choice) == expected(choice, 9)[0 if here else 1 :]
    assert at_rest(engine)


def test_each_choice_ends_on_its_own_and_the_first_may_end_first() -> None:
    engine = play()
    admit(engine, 3, here=True, eos=[FIRST, expected(1, 3)[2]])
    engine.run()
    assert [said(engine, choice) for choice in range(3)] == [[FIRST], expected(1, 3), expected(2, 6)]
    ends = [e.status for e in engine.events if isinstance(e, TokenDelta) and e.status.is_done]
    assert sorted(ends) == [GenerationStatus.END_OF_SEQUENCE] * 2 + [GenerationStatus.MAXIMUM_LENGTH]
    assert at_rest(engine)


@pytest.mark.parametrize("steps", [1, 3])
def test_release_frees_every_choice(steps: int) -> None:
    engine = play(max_batch_size=2)
    one = admit(engine, 4, 30, here=True, eos=[FIRST])
    for _ in range(steps):
        engine.step()
    engine.send(Release(one))
    assert at_rest(engine) and engine.step() is None


def test_a_failure_of_one_choice_is_the_request_s_one_last_word() -> None:
    engine = play()
    one = admit(engine, 3, 30, here=True)
    engine.step()
    engine.pipeline.fail_with = {
        RequestID("r/1"): InternalError("no"),
        RequestID("r/2"): InternalError("neither"),
    }
    engine.step()
    failed = [event for event in engine.events if isinstance(event, Failed)]
    assert [event.fence for event in failed] == [one]
    assert at_rest(engine)


def test_a_deadline_ends_them_all_with_one_word() -> None:
    engine = play()
    one = admit(engine, 3, 30, here=True)
    engine.step()
    engine.sweep(61.0)
    assert [event.fence for event in engine.events if isinstance(event, Failed)] == [one]
    assert at_rest(engine)


def test_a_newer_attempt_replaces_those_whose_first_choice_has_ended() -> None:
    engine = play()
    one = admit(engine, 2, 30, here=True, eos=[FIRST])
    engine.step()
    engine.step()
    again = canary_context(PROMPT, 3, request_id="r")
    engine.send(Admit(fence("r", 2), again, 60.0, prefill_here=True))
    engine.run()
    assert [event.fence for event in engine.events if isinstance(event, Failed)] == [one]
    assert engine.tokens_of(fence("r", 2)) == continuation(PROMPT, 3)
    assert at_rest(engine)


def test_a_sibling_token_outside_the_vocabulary_is_refused() -> None:
    engine = play()
    one = admit(engine, 2)
    engine.send(Adopt(one, FIRST, None, [SampledToken(VOCAB_SIZE)]))
    assert isinstance(engine.last_word_of(one), Failed)
    assert at_rest(engine)


def test_choices_that_are_still_to_come_count_as_waiting() -> None:
    engine = play(max_waiting=4)
    one = admit(engine, 5)
    engine.send(Admit(fence("other"), canary_context(PROMPT, 3, request_id="other"), 60.0, prefill_here=True))
    refused = engine.last_word_of(fence("other"))
    assert isinstance(refused, Failed) and refused.error.kind == "Overloaded"
    assert "4" in refused.error.message
    adopt(engine, one, 5)
    engine.run()
    assert [said(engine, choice) for choice in range(5)] == [expected(choice, 6)[1:] for choice in range(5)]
