"""The decode scheduler with two replicas, and under policies other than its own: exact batches, exact tokens."""

import pytest

from decode_nodes.scheduler import DecodeScheduler
from pipelines.runtime.messages import Admit, Adopt, PrefillHere, Release, Reserved, TokenDelta
from pipelines.types.batch import BatchType
from pronghorn.ids import Fence
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import continuation, write_blocks
from tests.fakes.engine_play import EnginePlay, fence

BUDGET_S = 60.0


def play(replicas: int = 2, **changes: object) -> EnginePlay:
    return EnginePlay(canary_config(data_parallel=replicas, **changes), DecodeScheduler)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def admit(engine: EnginePlay, name: str, prompt: list[int], new_tokens: int = 8, *, here: bool = True) -> Fence:
    context = canary_context(prompt, new_tokens, request_id=name)
    engine.send(Admit(fence(name), context, BUDGET_S, prefill_here=here))
    return fence(name)


def adopt(engine: EnginePlay, one: Fence, prompt: list[int]) -> None:
    """Write the wanted blocks and say so, as the shell does."""
    (reserved,) = [e for e in engine.events if isinstance(e, Reserved) and e.fence == one]
    wanted = {p: block for p, block in enumerate(reserved.block_ids) if p >= reserved.cached_blocks}
    write_blocks(engine.memory, engine.config.block_tokens, prompt, wanted)
    engine.send(Adopt(one, *continuation(prompt, 1)))


def cached_tokens(engine: EnginePlay, one: Fence) -> int | None:
    return next(e.num_cached_tokens for e in engine.events if isinstance(e, TokenDelta) and e.fence == one)


def at_rest(engine: EnginePlay) -> bool:
    load = engine.scheduler.load()
    return load.held_blocks == load.waiting == load.running == load.awaiting_blocks == 0


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.conformance(52)
def test_requests_go_to_the_least_loaded_replica_and_each_computes_its_own() -> None:
    engine = play()
    for index, name in enumerate("abc"):
        admit(engine, name, prompt_of(6, 100 * index + 1), 2)
    engine.run()
    assert engine.plans == [[[("a", 6), ("c", 6)], [("b", 6)]], [[("a", 1), ("c", 1)], [("b", 1)]]]
    for index, name in enumerate("abc"):
        assert engine.tokens_of(fence(name)) == continuation(prompt_of(6, 100 * index + 1), 2)
    assert at_rest(engine)


@pytest.mark.conformance(52)
def test_pulled_sequences_count_as_load_and_a_free_place_is_taken_first() -> None:
    engine = play()
    blocks: dict[str, range] = {}
    for index, name in enumerate("abcd"):
        one = admit(engine, name, prompt_of(6, 100 * index + 1), here=False)
        (reserved,) = [e for e in engine.events if isinstance(e, Reserved) and e.fence == one]
        pool = reserved.block_ids[0] // engine.config.num_blocks
        blocks[name] = range(pool * 64, pool * 64 + 64)
        assert all(block in blocks[name] for block in reserved.block_ids), "block ids are global"
    assert [blocks[name].start for name in "abcd"] == [0, 64, 0, 64]
    engine.send(Release(fence("b")), Release(fence("d")))
    admit(engine, "e", prompt_of(6, 500), 1)
    engine.run()
    assert engine.plans == [[[], [("e", 6)]]]


def test_where_the_least_loaded_has_no_blocks_the_next_one_is_asked() -> None:
    engine = play(num_blocks=8)
    admit(engine, "long", prompt_of(24), here=False)
    admit(engine, "a", prompt_of(4, 100), here=False)
    admit(engine, "b", prompt_of(4, 200), here=False)
    admit(engine, "nowhere", prompt_of(12, 300), here=False)
    pools = [e.block_ids[0] // 8 for e in engine.events if isinstance(e, Reserved)]
    assert pools == [0, 1, 1], "both had one slot taken when the last one came, and replica 0 one block left"
    assert engine.scheduler.load().waiting == 1


def test_slots_are_a_replicas_own_and_the_load_is_their_sum() -> None:
    engine = play(max_batch_size=2)
    for index in range(5):
        admit(engine, f"r{index}", prompt_of(6, 50 * index + 1), here=index % 2 == 0)
    load = engine.scheduler.load()
    assert (load.waiting, load.running, load.awaiting_blocks) == (1, 2, 2)
    assert (load.total_blocks, load.held_blocks, load.free_blocks) == (128, 8, 120)


def test_a_prompt_has_to_fit_one_pool() -> None:
    engine = play(num_blocks=4)
    one = admit(engine, "one", prompt_of(16))
    word = engine.last_word_of(one)
    assert "needs 5 blocks" in word.error.message and "the whole pool has 4" in word.error.message  # type: ignore[union-attr]  # a Failed


# --- the prefix of another replica -----------------------------------------------------------------------------------


@pytest.mark.conformance(52)
def test_what_another_replica_has_cached_is_copied_and_not_computed() -> None:
    engine, prompt = play(), prompt_of(14)
    admit(engine, "warm", prompt, 1)
    engine.run()
    admit(engine, "busy", prompt_of(6, 100), here=False)  # replica 0 again, so that the next one goes to replica 1
    one = admit(engine, "one", prompt, 4)
    assert len(engine.copies) == 3
    assert [(copy.source // 64, copy.destination // 64) for copy in engine.copies] == [(0, 1)] * 3
    engine.run()
    assert engine.plans[1] == [[], [("one", 2)]]
    assert engine.tokens_of(one) == continuation(prompt, 4)
    assert cached_tokens(engine, one) == 12


def test_copied_blocks_are_not_pulled() -> None:
    engine, prompt = play(), prompt_of(14)
    admit(engine, "warm", prompt, 1)
    engine.run()
    admit(engine, "busy", prompt_of(6, 100), here=False)
    one = admit(engine, "one", prompt, 4, here=False)
    (reserved,) = [e for e in engine.events if isinstance(e, Reserved) and e.fence == one]
    assert (len(reserved.block_ids), reserved.cached_blocks) == (4, 3)
    adopt(engine, one, prompt)
    engine.run()
    assert engine.tokens_of(one) == continuation(prompt, 4)[1:]


@pytest.mark.parametrize("changes", [{"enable_dp_cross_replica_prefix_copy": False}, {"enable_prefix_caching": False}])
@pytest.mark.conformance(52)
def test_nothing_is_copied_where_that_is_off(changes: dict[str, object]) -> None:
    engine, prompt = play(**changes), prompt_of(14)
    admit(engine, "warm", prompt, 1)
    engine.run()
    admit(engine, "busy", prompt_of(6, 100), here=False)
    one = admit(engine, "one", prompt, 4)
    engine.run()
    assert engine.copies == [] and engine.tokens_of(one) == continuation(prompt, 4)
    assert cached_tokens(engine, one) == 0


def test_tenants_do_not_copy_from_each_other() -> None:
    engine, prompt = play(), prompt_of(14)
    context = canary_context(prompt, 1, request_id="warm", salt="tenant-a")
    engine.send(Admit(fence("warm"), context, BUDGET_S, prefill_here=True))
    engine.run()
    admit(engine, "busy", prompt_of(6, 100), here=False)
    admit(engine, "one", prompt, 4)
    assert engine.copies == []


# --- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.conformance(51)
def test_a_replica_preempts_its_own_newest_and_the_other_is_left_alone() -> None:
    engine = play(num_blocks=8)
    prompts = {name: prompt_of(6, 100 * index + 1) for index, name in enumerate("abcd")}
    fences = {name: admit(engine, name, prompt, 20) for name, prompt in prompts.items()}
    engine.run()
    assert all(engine.tokens_of(fences[name]) == continuation(prompts[name], 20) for name in "abcd")
    windows = {name: [n for plan in engine.plans for part in plan for who, n in part if who == name] for name in "abcd"}
    assert windows["a"] == windows["b"] == [6, *[1] * 19], "the oldest of each replica ran through"
    assert max(windows["c"][1:]) > 1 and max(windows["d"][1:]) > 1, "the newest of each started over"
    assert at_rest(engine)


# --- policies --------------------------------------------------------------------------------------------------------


def test_a_decode_node_mixes_both_kinds_unless_told_otherwise() -> None:
    engine = play(1)
    admit(engine, "a", prompt_of(6), 3)
    engine.step()
    admit(engine, "b", prompt_of(20, 100), 2)
    engine.run()
    assert engine.plans == [[[("a", 6)]], [[("a", 1), ("b", 15)]], [[("a", 1), ("b", 5)]], [[("b", 1)]]]
    assert [batch.batch_type for batch in engine.batches] == [BatchType.CE, BatchType.CE, BatchType.CE, BatchType.TG]


def test_prompts_first_without_mixing() -> None:
    engine = play(1, scheduling_strategy="prefill_first", enable_in_flight_batching=False)
    admit(engine, "a", prompt_of(6), 3)
    engine.step()
    admit(engine, "b", prompt_of(20, 100), 2)
    engine.run()
    assert engine.plans == [
        [[("a", 6)]],
        [[("b", 16)]],
        [[("b", 4)]],
        [[("a", 1), ("b", 1)]],
        [[("a", 1)]],
    ]


def test_sequences_first_without_mixing() -> None:
    engine = play(1, scheduling_strategy="decode_first", enable_in_flight_batching=False)
    admit(engine, "a", prompt_of(6), 3)
    engine.step()
    admit(engine, "b", prompt_of(20, 100), 1)
    engine.run()
    assert engine.plans == [[[("a", 6)]], [[("a", 1)]], [[("a", 1)]], [[("b", 16)]], [[("b", 4)]]]


@pytest.mark.conformance(50)
def test_a_prompt_is_not_starved_by_sequences_that_keep_coming() -> None:
    engine = play(
        1,
        scheduling_strategy="decode_first",
        enable_in_flight_batching=False,
        max_passed_over_steps=4,
        max_batch_size=8,
    )
    first = admit(engine, "p0", prompt_of(5, 500), 40, here=False)
    adopt(engine, first, prompt_of(5, 500))
    waiting = admit(engine, "waiting", prompt_of(20), 2)
    for index in range(1, 30):
        prompt = prompt_of(5, 500 + index)
        one = admit(engine, f"p{index}", prompt, 4, here=False)
        adopt(engine, one, prompt)
        for _ in range(3):
            engine.step()
    assert engine.tokens_of(waiting) == continuation(prompt_of(20), 2)


@pytest.mark.conformance(50)
def test_only_the_last_prompt_of_a_replica_is_cut_and_it_is_the_next_ones_first() -> None:
    engine = play(max_batch_input_tokens=10)
    for index, name in enumerate("abcdef"):
        admit(engine, name, prompt_of(8, 100 * index + 1), 1)
    engine.run()
    assert engine.plans == [
        [[("a", 8), ("c", 2)], [("b", 8), ("d", 2)]],
        [[("c", 6), ("e", 4)], [("d", 6), ("f", 4)]],
        [[("e", 4)], [("f", 4)]],
    ]


def test_an_older_prompt_whose_pull_failed_does_not_overtake_one_that_is_begun() -> None:
    engine = play(1)
    pulled = admit(engine, "pulled", prompt_of(6, 100), 1, here=False)
    admit(engine, "long", prompt_of(30), 1)
    admit(engine, "newer", prompt_of(3, 200), 1)
    engine.step()
    engine.send(PrefillHere(pulled))
    engine.run()
    assert engine.plans == [[[("long", 16)]], [[("long", 14), ("pulled", 2)]], [[("pulled", 4), ("newer", 3)]]]


def test_without_chunks_a_long_prompt_is_computed_whole_and_closes_the_step() -> None:
    engine = play(1, enable_chunked_prefill=False)
    for name, length in (("a", 6), ("b", 30), ("c", 5)):
        admit(engine, name, prompt_of(length, 100 * ord(name) % 700), 1)
    engine.run()
    assert engine.plans == [[[("a", 6), ("b", 30)]], [[("c", 5)]]]


@pytest.mark.conformance(51)
def test_under_pressure_sequences_are_finished_before_prompts_are_begun() -> None:
    changes: dict[str, object] = {"scheduling_strategy": "per_replica", "enable_in_flight_batching": False}
    engine = play(1, num_blocks=10, kv_pressure_fraction=0.5, **changes)
    admit(engine, "a", prompt_of(6), 3)
    engine.step()
    admit(engine, "b", prompt_of(14, 100), 1)
    engine.run()
    assert engine.plans == [[[("a", 6)]], [[("a", 1)]], [[("a", 1)]], [[("b", 14)]]]


# --- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.conformance(53)
def test_decode_batches_are_padded_to_the_longest_replica_and_dummies_live_one_batch_longer() -> None:
    engine = play(device_graph_capture=True)
    fences = [admit(engine, name, prompt_of(6, 100 * i + 1), 4) for i, name in enumerate("abc")]
    engine.step()
    prompts = engine.batches[0]
    assert [len(batch) for batch in prompts.batches] == [2, 1], "prompts are not padded"
    engine.step()
    padded = engine.batches[1]
    assert [len(batch) for batch in padded.batches] == [2, 2]
    assert (padded.batch_size, padded.batch_type, padded.input_tokens) == (3, BatchType.TG, 4)
    assert padded.per_replica_input_tokens == [2, 1]
    dummy = padded.batches[1][1]
    assert dummy._is_padding_ctx and (dummy.tokens.prompt_length, dummy.tokens[0]) == (1, 0)
    held = engine.scheduler.load().held_blocks
    assert engine.scheduler.table(dummy.request_id)[0] >= 64, "its blocks are of its own replica's pool"
    engine.scheduler.take_ended()
    engine.step()
    assert dummy.request_id in engine.scheduler.take_ended()
    again = engine.batches[2].batches[1][1]
    assert again.request_id != dummy.request_id and engine.scheduler.load().held_blocks == held
    engine.run()
    for index, one in enumerate(fences):
        assert engine.tokens_of(one) == continuation(prompt_of(6, 100 * index + 1), 4)
    assert engine.step() is None and at_rest(engine)


@pytest.mark.parametrize("changes", [{"device_graph_capture": False}, {"device_graph_capture": True, "replicas": 1}])
@pytest.mark.conformance(53)
def test_without_graph_capture_or_with_one_replica_nothing_is_padded(changes: dict[str, int]) -> None:
    engine = play(**changes)
    for index, name in enumerate("abc"):
        admit(engine, name, prompt_of(6, 100 * index + 1), 3)
    engine.run()
    assert not any(context._is_padding_ctx for batch in engine.batches for context in batch.flat_batch)


def test_a_pool_without_room_for_a_dummy_leaves_the_batch_as_it_is() -> None:
    engine = play(device_graph_capture=True, num_blocks=4)
    admit(engine, "a", prompt_of(3), 3)
    admit(engine, "full", prompt_of(14, 100), 2)
    admit(engine, "c", prompt_of(3, 200), 3)
    engine.run()
    assert [[len(part) for part in plan] for plan in engine.plans] == [[2, 1], [2, 1], [2, 2]]
    assert engine.tokens_of(fence("c")) == continuation(prompt_of(3, 200), 3)
    assert engine.step() is None and at_rest(engine)
