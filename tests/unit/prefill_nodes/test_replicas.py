"""The prefill scheduler with two replicas: exact batches, and blocks that can be read."""

from pipelines.runtime.messages import ChunkReady, FirstToken, Prefill, Release, ResetPrefixCache
from prefill_nodes.scheduler import PrefillScheduler
from pronghorn.ids import Fence
from tests.fakes.canary_engine import canary_config, canary_context
from tests.fakes.canary_pipeline import continuation, expected_block
from tests.fakes.engine_play import EnginePlay, fence


def play(**changes: object) -> EnginePlay:
    return EnginePlay(canary_config(data_parallel=2, **changes), PrefillScheduler)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def prefill(engine: EnginePlay, name: str, prompt: list[int]) -> Fence:
    wanted = list(range(-(-len(prompt) // engine.config.block_tokens)))
    engine.send(Prefill(fence(name), canary_context(prompt, request_id=name), wanted, 60.0))
    return fence(name)


def assert_readable(engine: EnginePlay, of: Fence, prompt: list[int]) -> None:
    reports = [event for event in engine.events if isinstance(event, ChunkReady) and event.fence == of]
    blocks = {p: b for report in reports for p, b in zip(report.positions, report.block_ids, strict=True)}
    assert sorted(blocks) == list(range(-(-len(prompt) // engine.config.block_tokens)))
    for position, block in blocks.items():
        data = expected_block(prompt, position, engine.config.block_tokens)
        assert bytes(engine.memory.block(block)[: len(data)]) == data


def test_each_replica_takes_its_own_chunk_of_every_step() -> None:
    engine = play()
    prompts = {
        name: prompt_of(length, 100 * i + 1) for i, (name, length) in enumerate(zip("abc", (20, 30, 5), strict=True))
    }
    for name, prompt in prompts.items():
        prefill(engine, name, prompt)
    engine.run()
    assert engine.plans == [[[("a", 16)], [("b", 16)]], [[("a", 4), ("c", 5)], [("b", 14)]]]
    for name, prompt in prompts.items():
        assert_readable(engine, fence(name), prompt)
    firsts = {event.fence.request_id.value: event.token for event in engine.events if isinstance(event, FirstToken)}
    assert firsts == {name: continuation(prompt, 1)[0] for name, prompt in prompts.items()}


def test_blocks_copied_from_the_other_replica_are_reported_before_any_step_and_can_be_read() -> None:
    engine, prompt = play(), prompt_of(18)
    engine.send(Release(prefill(engine, "gone", prompt_of(3, 900))))
    warm = prefill(engine, "warm", prompt)
    engine.run()
    busy = prefill(engine, "busy", prompt_of(3, 500))
    again = prefill(engine, "again", prompt)
    (report,) = [event for event in engine.events if isinstance(event, ChunkReady) and event.fence == again]
    assert report.positions == [0, 1, 2, 3] and all(block >= 64 for block in report.block_ids)
    assert len(engine.copies) == 4
    engine.send(Release(warm), Release(busy))
    engine.run()
    assert engine.plans[-1] == [[], [("again", 2)]]
    assert_readable(engine, again, prompt)
    engine.send(Release(again))
    assert engine.scheduler.load().held_blocks == 0


def test_a_reset_forgets_what_every_replica_has() -> None:
    engine = play()
    for index in range(2):
        prefill(engine, f"r{index}", prompt_of(9, 100 * index + 1))
    engine.run()
    engine.send(Release(fence("r0")), Release(fence("r1")))
    assert engine.scheduler.load().cached_blocks == 4
    engine.scheduler.handle(ResetPrefixCache(), 0.0)
    assert engine.scheduler.load().cached_blocks == 0
