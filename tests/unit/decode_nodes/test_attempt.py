import itertools

import numpy as np
import pytest

from decode_nodes.attempt import (
    TRANSITIONS,
    Attempt,
    AttemptState,
    Effect,
    Say,
    SayFailure,
    StartBringing,
    StartFetch,
    StartPull,
    StopBringing,
    StopFetch,
    StopPull,
    Tell,
)
from pipelines.runtime.messages import Admit, Adopt, Failed, PrefillHere, Release, Reserved, TokenDelta
from pipelines.types.frames import Delta, PrefillTarget, Submit
from pipelines.types.handover import FirstToken
from pipelines.types.status import GenerationStatus
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.deadline import Deadline
from pronghorn.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    NodeLost,
    Overloaded,
    PronghornError,
    TransferFailed,
)
from pronghorn.ids import Fence, Incarnation, NodeName, RequestID

BLOCK_TOKENS = 4
FENCE = Fence(RequestID("r"), 1, Incarnation("d" * 32))
P1 = PrefillTarget(NodeName("prefill-1"), "127.0.0.1:1", Incarnation("1" * 32))
P2 = PrefillTarget(NodeName("prefill-2"), "127.0.0.1:2", Incarnation("2" * 32))
ROOM = 1000
LOST = NodeLost("prefill-1 is gone")
DONE = TokenDelta(FENCE, [9], GenerationStatus.END_OF_SEQUENCE)


def new_attempt(*targets: PrefillTarget, only_these: bool = False, deaths: int = 0) -> Attempt:
    context = TextContext(max_length=64, tokens=TokenBuffer(np.arange(10, dtype=np.int64)))
    submit = Submit(FENCE, context, 30.0, list(targets), only_these, deaths=deaths)
    return Attempt(submit, Deadline(30.0), BLOCK_TOKENS)


def pulling(*targets: PrefillTarget, only_these: bool = False, deaths: int = 0) -> Attempt:
    attempt = new_attempt(*targets, only_these=only_these, deaths=deaths)
    attempt.begin(30.0)
    attempt.on_reserved(Reserved(FENCE, [7, 5, 3], 1))
    return attempt


def commands(effects: list[Effect]) -> list[object]:
    return [effect.command for effect in effects if isinstance(effect, Tell)]


def test_without_targets_the_prompt_is_computed_here() -> None:
    attempt = new_attempt()
    [admit] = commands(attempt.begin(12.0))
    assert isinstance(admit, Admit) and admit.prefill_here and admit.budget_s == 12.0
    assert attempt.state is AttemptState.RUNNING
    assert attempt.on_tokens(DONE) == [Say(Delta(FENCE, [9], GenerationStatus.END_OF_SEQUENCE))]
    assert attempt.state is AttemptState.ENDED


def test_a_local_prompt_is_computed_once_what_others_have_of_it_is_here() -> None:
    attempt = new_attempt()
    assert attempt.begin(12.0, may_bring=True) == [StartBringing()] and attempt.state is AttemptState.BRINGING
    [admit] = commands(attempt.on_brought(10.0))
    assert isinstance(admit, Admit) and admit.prefill_here and admit.budget_s == 10.0
    assert attempt.state is AttemptState.RUNNING and attempt.on_brought(9.0) == []


@pytest.mark.parametrize("may_bring", [False, True])
def test_a_local_prompt_counts_against_the_room_for_such_until_its_first_token(may_bring: bool) -> None:
    attempt = new_attempt()
    attempt.begin(12.0, may_bring)
    assert attempt.local_prefill_tokens == 10
    if may_bring:
        attempt.on_brought(10.0)
    assert attempt.local_prefill_tokens == 10
    attempt.on_tokens(TokenDelta(FENCE, [9], GenerationStatus.ACTIVE))
    assert attempt.local_prefill_tokens == 0


def test_an_attempt_that_ends_while_its_prefix_comes_tells_the_engine_nothing() -> None:
    attempt = new_attempt()
    attempt.begin(12.0, may_bring=True)
    assert attempt.cancel(None) == [StopBringing()] and attempt.state is AttemptState.ENDED
    assert attempt.on_brought(10.0) == []


def test_the_hits_of_either_node_are_hits() -> None:
    attempt = pulling(P1)
    [first] = attempt.on_first_token(FirstToken(7, num_cached_tokens=64))
    assert isinstance(first, Say) and first.delta.num_cached_tokens == 64


def test_only_positions_behind_the_cached_blocks_are_pulled() -> None:
    attempt = new_attempt(P1)
    attempt.begin(30.0)
    assert attempt.on_reserved(Reserved(FENCE, [7, 5, 3], 1)) == [StartPull(P1, {1: 5, 2: 3})]
    assert attempt.state is AttemptState.PULLING


@pytest.mark.conformance(47)
def test_the_first_token_leaves_at_once_and_is_adopted_at_the_commit() -> None:
    attempt = pulling(P1)
    assert attempt.on_first_token(FirstToken(42)) == [Say(Delta(FENCE, [42], num_cached_tokens=4))]
    assert attempt.on_pull_end(None, ROOM) == [Tell(Adopt(FENCE, 42))]
    assert attempt.state is AttemptState.RUNNING


@pytest.mark.conformance(46)
def test_a_failed_pull_goes_to_the_next_target_and_then_home() -> None:
    attempt = pulling(P1, P2)
    assert attempt.on_pull_end(LOST, ROOM) == [StartPull(P2, {1: 5, 2: 3})]
    assert attempt.on_pull_end(LOST, ROOM) == [Tell(PrefillHere(FENCE))]
    assert attempt.state is AttemptState.RUNNING


def test_a_delivered_first_token_is_kept_and_not_delivered_again() -> None:
    attempt = pulling(P1, P2)
    attempt.on_first_token(FirstToken(42))
    attempt.on_pull_end(LOST, ROOM)
    assert attempt.on_first_token(FirstToken(43)) == []
    assert attempt.on_pull_end(None, ROOM) == [Tell(Adopt(FENCE, 42))]


def test_prefill_here_keeps_the_delivered_first_token() -> None:
    attempt = pulling(P1)
    attempt.on_first_token(FirstToken(42))
    assert attempt.on_pull_end(TransferFailed("bad", code="wrong_digest"), ROOM) == [Tell(PrefillHere(FENCE, 42))]


@pytest.mark.parametrize("error", [LOST, EngineDied("killed"), TransferFailed("bad", code="wrong_digest")])
def test_only_these_ends_in_the_last_targets_error_which_is_not_this_nodes_own(error: PronghornError) -> None:
    attempt = pulling(P1, only_these=True)
    release, said = attempt.on_pull_end(error, ROOM)
    assert release == Tell(Release(FENCE)) and isinstance(said, SayFailure)
    assert said.error.kind == "NoPrefill" and said.error.code == error.code and error.message in said.error.message
    assert attempt.state is AttemptState.ENDED


def test_only_these_being_full_is_told_as_load() -> None:
    full = Overloaded("full", retry_after_s=2.0)
    *_, said = pulling(P1, only_these=True).on_pull_end(full, ROOM)
    assert said == SayFailure(full.record())


@pytest.mark.field("vllm#55470")
@pytest.mark.conformance(48)
def test_blocks_are_not_given_back_before_the_pull_has_ended() -> None:
    attempt = pulling(P1)
    error = DeadlineExceeded("too late")
    assert attempt.cancel(error) == [StopPull(), SayFailure(error.record())]
    assert attempt.state is AttemptState.STOPPING
    assert attempt.on_first_token(FirstToken(42)) == []
    assert attempt.on_pull_end(Cancelled("stopped"), ROOM) == [Tell(Release(FENCE))]
    assert attempt.state is AttemptState.ENDED


def test_a_commit_that_comes_while_stopping_is_too_late() -> None:
    attempt = pulling(P1)
    attempt.on_first_token(FirstToken(42))
    attempt.cancel(None)
    assert attempt.on_pull_end(None, ROOM) == [Tell(Release(FENCE))]


def test_an_abort_before_the_reservation_releases_and_ignores_the_reservation_that_was_under_way() -> None:
    attempt = new_attempt(P1)
    attempt.begin(30.0)
    assert attempt.cancel(None) == [Tell(Release(FENCE))]
    assert attempt.on_reserved(Reserved(FENCE, [1, 2], 0)) == []


@pytest.mark.conformance(45)
def test_an_engine_failure_is_the_last_word_and_releases() -> None:
    attempt = new_attempt()
    attempt.begin(30.0)
    error = LOST.record()
    assert attempt.on_failed(Failed(FENCE, error)) == [Tell(Release(FENCE)), SayFailure(error)]
    assert attempt.on_tokens(DONE) == []


def test_at_most_one_last_word_whatever_happens_in_whatever_order() -> None:
    happenings = {
        "reserve": lambda a: a.on_reserved(Reserved(FENCE, [7, 5, 3], 1)),
        "token": lambda a: a.on_first_token(FirstToken(42)),
        "fail": lambda a: a.on_failed(Failed(FENCE, LOST.record())),
        "deadline": lambda a: a.cancel(DeadlineExceeded("late")),
        "abort": lambda a: a.cancel(None),
        "delta": lambda a: a.on_tokens(DONE),
    }
    for order in itertools.permutations(happenings):
        attempt = new_attempt(P1)
        effects = attempt.begin(30.0)
        pull_on = False
        for name in order:
            new = happenings[name](attempt)
            effects += new
            pull_on = pull_on or any(isinstance(effect, StartPull) for effect in new)
        if pull_on:
            effects += attempt.on_pull_end(Cancelled("stopped"), ROOM)
        last_words = [
            e for e in effects if isinstance(e, SayFailure) or (isinstance(e, Say) and e.delta.status.is_done)
        ]
        assert len(last_words) <= 1, order
        assert attempt.state is AttemptState.ENDED, order
        assert commands(effects)[-1] == Release(FENCE), order


@pytest.mark.parametrize("state", list(AttemptState))
def test_every_state_has_its_row_and_reaches_the_end(state: AttemptState) -> None:
    reached = {state}
    while (more := reached | {after for before in reached for after in TRANSITIONS[before]}) != reached:
        reached = more
    assert AttemptState.ENDED in reached


# --- the prompt is computed here only where there is room, and not where it kills ---


def test_without_room_to_compute_the_prompt_here_it_is_refused_for_another_node() -> None:
    attempt = pulling(P1)
    release, said = attempt.on_pull_end(LOST, 5)
    assert release == Tell(Release(FENCE))
    assert isinstance(said, SayFailure) and said.error.kind == "NoPrefill"
    assert "room to compute 5 prompt tokens" in said.error.message and "needs 6" in said.error.message
    assert attempt.state is AttemptState.ENDED


def test_what_is_computed_here_counts_until_its_first_token() -> None:
    attempt = pulling(P1)
    assert attempt.local_prefill_tokens == 0
    assert commands(attempt.on_pull_end(LOST, 6)) == [PrefillHere(FENCE)]
    assert attempt.local_prefill_tokens == 6, "a block of the ten tokens was cached"
    attempt.on_tokens(TokenDelta(FENCE, [9], GenerationStatus.ACTIVE))
    assert attempt.local_prefill_tokens == 0


def test_two_engines_that_die_of_it_are_enough() -> None:
    attempt = pulling(P1, P2)
    assert attempt.on_pull_end(EngineDied("gone"), ROOM) == [StartPull(P2, {1: 5, 2: 3})]
    release, said = attempt.on_pull_end(EngineDied("gone"), ROOM)
    assert release == Tell(Release(FENCE))
    assert isinstance(said, SayFailure) and said.error.kind == "PoisonRequest"
    assert attempt.state is AttemptState.ENDED


def test_deaths_in_earlier_attempts_count() -> None:
    said = pulling(P1, P2, deaths=1).on_pull_end(EngineDied("gone"), ROOM)[-1]
    assert isinstance(said, SayFailure) and said.error.kind == "PoisonRequest"


def test_lost_connections_and_torn_transfers_are_no_deaths() -> None:
    attempt = pulling(P1, P2, deaths=1)
    attempt.on_pull_end(LOST, ROOM)
    assert commands(attempt.on_pull_end(TransferFailed("torn"), ROOM)) == [PrefillHere(FENCE)]


def test_what_others_have_is_fetched_before_the_prompt_is_computed_here() -> None:
    attempt = pulling(P1, P2)
    attempt.on_first_token(FirstToken(42))
    attempt.on_pull_end(LOST, ROOM, may_fetch=True)
    assert attempt.on_pull_end(LOST, ROOM, may_fetch=True) == [StartFetch({1: 5, 2: 3}, (P1.name, P2.name))]
    assert attempt.state is AttemptState.FETCHING and attempt.local_prefill_tokens == 6
    assert attempt.on_fetched(1) == [Tell(PrefillHere(FENCE, 42, fetched_blocks=1))]
    assert attempt.state is AttemptState.RUNNING and attempt.local_prefill_tokens == 2


def test_blocks_that_a_fetch_writes_are_released_only_once_it_has_ended() -> None:
    attempt = pulling(P1)
    attempt.on_pull_end(LOST, ROOM, may_fetch=True)
    assert attempt.cancel(None) == [StopFetch()] and attempt.cancel(None) == []
    assert attempt.on_fetched(0) == [Tell(Release(FENCE))]
    assert attempt.state is AttemptState.ENDED
