"""What an engine holds for its shell itself, and prompts that wait for one another's prefix, over the canary."""

from collections.abc import Sequence

import numpy as np
import pytest

from decode_nodes.scheduler import DecodeScheduler
from kvcache.hashing import BlockHash, BlockHasher, pack_tokens
from pipelines.runtime.messages import (
    Admit,
    EndHold,
    FirstToken,
    HoldId,
    HoldRefused,
    ImportBlocks,
    Importing,
    LeaseBlocks,
    Leased,
    Prefill,
    PublishBlocks,
    Release,
)
from prefill_nodes.scheduler import PrefillScheduler
from tests.fakes.canary_engine import SEED, canary_config, canary_context
from tests.fakes.canary_pipeline import canary_layout, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

HASHER = BlockHasher("sha256", SEED, "canary", None, canary_layout(4))
HOLD = HoldId("hold-1")
BUDGET_S = 60.0


def chain(tokens: Sequence[int]) -> list[BlockHash]:
    return HASHER.chain(pack_tokens(np.array(tokens)), HASHER.root(None))


def play(**changes: object) -> EnginePlay:
    return EnginePlay(canary_config(**changes), PrefillScheduler)


def prefill(engine: EnginePlay, name: str, tokens: Sequence[int]) -> None:
    wanted = list(range(-(-len(tokens) // 4)))
    engine.send(Prefill(fence(name), canary_context(tokens, request_id=name), wanted, BUDGET_S))


def test_a_lease_keeps_blocks_from_being_evicted_until_it_ends() -> None:
    engine = play(num_blocks=12)
    prefill(engine, "a", range(1, 22))
    engine.run()
    engine.send(Release(fence("a")))
    engine.send(LeaseBlocks(HOLD, chain(range(1, 21))[:3]))
    (leased,) = engine.scheduler.take_hold_events()
    assert leased == Leased(HOLD, [0, 1, 2], 0)
    prefill(engine, "b", range(100, 136))  # all nine that are left
    engine.run()
    engine.send(Release(fence("b")), EndHold(HOLD))
    assert engine.scheduler.load().held_blocks == 0
    assert engine.scheduler.load().cached_blocks == 12


def test_a_lease_on_a_prompt_that_is_being_computed_grows_with_it() -> None:
    engine = play(max_batch_input_tokens=8)
    prefill(engine, "a", range(1, 22))
    engine.step()
    engine.send(LeaseBlocks(HOLD, [*chain(range(1, 21)), BlockHash(b"?" * 32)]))
    assert engine.scheduler.take_hold_events() == [Leased(HOLD, [0, 1], 3)]
    engine.step()
    assert engine.scheduler.take_hold_events() == [Leased(HOLD, [2, 3], 1)]
    engine.run()
    assert engine.scheduler.take_hold_events() == [Leased(HOLD, [4], 0)]
    engine.send(EndHold(HOLD), Release(fence("a")))
    assert engine.scheduler.load().held_blocks == 0


def test_what_was_promised_and_never_computed_is_not_coming_any_more() -> None:
    engine = play(max_batch_input_tokens=8)
    prefill(engine, "a", range(1, 22))
    engine.send(LeaseBlocks(HOLD, chain(range(1, 21))))
    assert engine.scheduler.take_hold_events() == [Leased(HOLD, [], 5)]
    engine.send(Release(fence("a")))
    assert engine.scheduler.take_hold_events() == [Leased(HOLD, [], 0)]


def test_an_import_is_computed_by_nobody_once_it_is_published() -> None:
    engine = play()
    tokens = list(range(1, 22))
    engine.send(ImportBlocks(HOLD, chain(tokens)))
    (importing,) = engine.scheduler.take_hold_events()
    assert isinstance(importing, Importing) and importing.found == 0
    write_blocks(engine.memory, 4, tokens, dict(enumerate(importing.block_ids[:3])))
    engine.send(PublishBlocks(HOLD, 3), EndHold(HOLD))
    prefill(engine, "a", tokens)
    engine.run()
    assert engine.only(FirstToken).fence == fence("a")
    assert engine.pipelines[0].computed_tokens == len(tokens) - 12
    engine.send(Release(fence("a")))
    assert engine.scheduler.load().held_blocks == 0


def test_an_import_that_would_leave_no_room_is_refused_and_holds_nothing() -> None:
    engine = play(num_blocks=8)
    engine.send(ImportBlocks(HOLD, chain(range(1, 33))))
    assert engine.scheduler.take_hold_events() == [HoldRefused(HOLD)]
    engine.send(PublishBlocks(HOLD, 1), EndHold(HOLD))
    assert engine.scheduler.load().free_blocks == 8


def test_an_import_without_prefix_caching_is_refused() -> None:
    engine = play(enable_prefix_caching=False)
    engine.send(ImportBlocks(HOLD, chain(range(1, 9))))
    assert engine.scheduler.take_hold_events() == [HoldRefused(HOLD)]


def test_prompts_that_come_at_once_and_share_a_prefix_compute_it_once() -> None:
    engine = play(max_batch_input_tokens=16)
    shared = list(range(1, 33))
    for index, name in enumerate("abcd"):
        prefill(engine, name, [*shared, 100 + index])
    prefill(engine, "e", range(200, 210))
    engine.run()
    assert {e.fence for e in engine.events if isinstance(e, FirstToken)} == {fence(name) for name in "abcde"}
    assert engine.pipelines[0].computed_tokens == 33 + 3 * 1 + 10


def test_who_waits_for_a_prefix_that_is_given_up_computes_it() -> None:
    engine = play(max_batch_input_tokens=8)
    shared = list(range(1, 33))
    for name in "ab":
        prefill(engine, name, shared)
    engine.step()
    engine.send(Release(fence("a")))
    engine.run()
    assert engine.only(FirstToken).fence == fence("b")


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_local_prompts_of_a_decode_node_compute_what_they_share_once_a_replica(data_parallel: int) -> None:
    engine = EnginePlay(canary_config(data_parallel=data_parallel), DecodeScheduler)
    for index, name in enumerate("abcd"):
        context = canary_context([*range(1, 33), 100 + index], new_tokens=2, request_id=name)
        engine.send(Admit(fence(name), context, BUDGET_S, prefill_here=True))
    engine.run()
    computed = sum(pipeline.computed_tokens for pipeline in engine.pipelines)
    assert computed <= 32 * data_parallel + 4 + 4
