"""The engine loop over scripted queues and a manual clock: every wait is a decision that the play can see."""

from collections.abc import Sequence

import pytest

from decode_nodes.scheduler import DecodeScheduler
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.loop import EngineLoop, InboxClosed
from pipelines.runtime.messages import (
    Admit,
    EngineCommand,
    EngineMessage,
    Release,
    Reserved,
    StepReport,
    Stop,
    TokenDelta,
)
from pipelines.types.batch import BatchType
from pronghorn.clock import ManualClock
from pronghorn.errors import InternalError
from pronghorn.ids import RequestID
from tests.fakes.canary_engine import build_canary_engine, canary_config, canary_context, canary_memory
from tests.fakes.canary_pipeline import CanaryPipeline, continuation, expected_block
from tests.fakes.engine_play import fence


class ScriptedInbox:
    """Gives one entry of the script a call, and ends it with Stop. An empty entry lets the loop's whole wait pass."""

    def __init__(self, clock: ManualClock, script: Sequence[Sequence[EngineCommand]]) -> None:
        self._clock = clock
        self._script = list(script)
        self.waits_s: list[float] = []

    def take(self, timeout_s: float) -> list[EngineCommand]:
        self.waits_s.append(timeout_s)
        commands: list[EngineCommand] = list(self._script.pop(0)) if self._script else [Stop()]
        if not commands:
            self._clock.advance(timeout_s)
        return commands


class ListOutbox:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def put(self, message: EngineMessage) -> None:
        assert isinstance(message, StepReport)
        self.reports.append(message)


class Rig:
    def __init__(self, *script: Sequence[EngineCommand], config: EngineConfig | None = None) -> None:
        self.config = config or canary_config()
        self.clock = ManualClock(100.0)
        self.memory = canary_memory(self.config)
        parts = build_canary_engine(self.config, bytes(32), self.memory, DecodeScheduler)
        self._pipeline = parts.pipeline
        self.inbox = ScriptedInbox(self.clock, script)
        self.outbox = ListOutbox()
        self.loop = EngineLoop(
            parts.scheduler,
            parts.pipeline,
            self.memory,
            self.inbox,
            self.outbox,
            self.clock,
            self.config.report_period_s,
            checked=True,
        )

    @property
    def pipeline(self) -> CanaryPipeline:
        """Of an engine of one replica."""
        assert isinstance(self._pipeline, CanaryPipeline)
        return self._pipeline

    def tokens(self) -> list[int]:
        events = [event for report in self.outbox.reports for event in report.events]
        return [token for event in events if isinstance(event, TokenDelta) for token in event.tokens]


def admit(name: str, *, here: bool = True, prompt: Sequence[int] = (1, 2, 3), new_tokens: int = 3) -> Admit:
    return Admit(fence(name), canary_context(prompt, new_tokens, request_id=name), 60.0, prefill_here=here)


def test_idle_it_waits_until_the_next_report_is_due_and_then_reports() -> None:
    rig = Rig([], [], [])
    rig.loop.run()
    assert rig.inbox.waits_s[0] == 0.0, "the first report is due at once"
    assert rig.inbox.waits_s[1:] == pytest.approx([0.05] * 3)
    assert [report.stats for report in rig.outbox.reports] == [None] * 4
    assert all(not report.events for report in rig.outbox.reports)


def test_with_work_it_does_not_wait_and_reports_every_step_with_its_stats() -> None:
    rig = Rig([admit("one")], [], [], [])
    rig.loop.run()
    assert rig.inbox.waits_s == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.05])
    assert rig.tokens() == continuation([1, 2, 3], 3)
    stats = [report.stats for report in rig.outbox.reports if report.stats is not None]
    assert [(s.batch_type, s.num_input_tokens, s.num_context_tokens, s.num_output_tokens) for s in stats] == [
        (BatchType.CE, 3, 0, 1),
        (BatchType.TG, 1, 3, 1),
        (BatchType.TG, 1, 4, 1),
    ]
    assert rig.pipeline.released == [RequestID("one")]


def test_the_prompt_tokens_of_a_mixed_step_are_told_from_the_tokens_that_sequences_feed() -> None:
    rig = Rig([admit("one")], [admit("two", prompt=(5, 6, 7, 8))])
    rig.loop.run()
    steps = [(report.stats.num_input_tokens, report.prompt_tokens) for report in rig.outbox.reports if report.stats]
    assert steps == [(3, 3), (5, 4)]


def test_copies_between_replicas_are_made_before_what_they_cause_is_reported() -> None:
    config = canary_config(data_parallel=2)
    prompt = range(1, 15)
    rig = Rig(
        [admit("warm", prompt=prompt, new_tokens=1)],
        [admit("busy", here=False, prompt=(7, 8)), admit("pulled", here=False, prompt=prompt)],
        config=config,
    )
    rig.loop.run()
    reserved = [event for report in rig.outbox.reports for event in report.events if isinstance(event, Reserved)][1]
    assert reserved.cached_blocks == 3 and all(block >= config.num_blocks for block in reserved.block_ids)
    for position, block in enumerate(reserved.block_ids[:3]):
        assert bytes(rig.memory.block(block)) == expected_block(list(prompt), position, config.block_tokens)


def test_what_a_command_causes_is_reported_before_the_step() -> None:
    rig = Rig([admit("busy"), admit("pulled", here=False)])
    rig.loop.run()
    first = rig.outbox.reports[0]
    assert [type(event) for event in first.events] == [Reserved] and first.stats is None
    assert rig.outbox.reports[1].stats is not None


def test_a_request_that_waits_for_blocks_does_not_make_it_spin() -> None:
    config = canary_config(num_blocks=4)
    rig = Rig([admit("held", here=False, prompt=range(12)), admit("waits", prompt=range(12))], [], [], config=config)
    rig.loop.run()
    assert rig.inbox.waits_s[1:] == pytest.approx([0.05] * 3)


def test_deadlines_are_swept_while_idle() -> None:
    late = Admit(fence("one"), canary_context([1, 2], request_id="one"), budget_s=0.04)
    rig = Rig([late], [], [])
    rig.loop.run()
    assert any(event.fence == fence("one") for report in rig.outbox.reports[1:] for event in report.events)


def test_a_release_is_seen_in_the_load_of_a_report_of_its_own() -> None:
    rig = Rig([admit("one", here=False)], [Release(fence("one"))])
    rig.loop.run()
    assert [report.load.held_blocks for report in rig.outbox.reports[-2:]] == [0, 0]
    assert rig.outbox.reports[0].load.held_blocks == 1
    assert rig.pipeline.released == [RequestID("one")]


def test_a_failure_of_one_request_is_an_event_and_any_other_ends_the_loop() -> None:
    rig = Rig([admit("bad"), admit("good", prompt=(7, 8))], [], [], [])
    rig.pipeline.fail_with[RequestID("bad")] = InternalError("its logits are not finite")
    rig.loop.run()
    assert rig.tokens() == continuation([7, 8], 3)
    broken = Rig([admit("one")])
    broken.pipeline.break_with = ArithmeticError("the model is broken")
    with pytest.raises(ArithmeticError):
        broken.loop.run()


def test_stop_ends_the_loop_without_another_step() -> None:
    rig = Rig([admit("one"), Stop()])
    rig.loop.run()
    assert rig.tokens() == [] and rig.pipeline.computed_tokens == 0


def test_an_inbox_that_closes_ends_the_loop() -> None:
    rig = Rig()

    def closed(timeout_s: float) -> list[EngineCommand]:
        raise InboxClosed

    rig.inbox.take = closed  # type: ignore[method-assign]  # the shell is gone
    with pytest.raises(InboxClosed):
        rig.loop.run()
