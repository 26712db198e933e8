import logging

import pytest

from pipelines.node.batch_log import BatchLog
from pipelines.runtime.messages import EngineLoad, StepReport
from pipelines.types.batch import BatchType, CompletedBatchStats
from pronghorn.counters import Counters

LOAD = EngineLoad(
    total_blocks=64, free_blocks=40, held_blocks=24, cached_blocks=3, waiting=5, running=8, awaiting_blocks=0
)


def report(kind: BatchType, tokens_in: int, tokens_out: int, prompt_tokens: int = 0, s: float = 0.1) -> StepReport:
    stats = CompletedBatchStats(kind, 8, tokens_in, 100, s, num_output_tokens=tokens_out)
    return StepReport([], LOAD, stats, prompt_tokens)


def test_totals_and_latest_speeds() -> None:
    counters = Counters()
    batches = BatchLog("decode-1", counters, 10.0)
    assert (batches.prompt_throughput, batches.generation_throughput) == (0.0, 0.0)
    batches.note(report(BatchType.CE, 50, 7, prompt_tokens=43), 0.0)
    batches.note(report(BatchType.TG, 8, 8), 0.1)
    batches.note(StepReport([], LOAD), 0.2)
    assert counters.snapshot() == {"batches.CE": 1, "batches.TG": 1, "prompt_tokens": 43, "generated_tokens": 15}
    assert (batches.prompt_throughput, batches.generation_throughput) == pytest.approx((500.0, 80.0))


def test_info_has_one_line_a_period_and_debug_one_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    batches = BatchLog("decode-1", Counters(), 10.0)
    for now_s in (0.0, 1.0, 9.9, 10.0, 11.0):
        batches.note(report(BatchType.TG, 8, 8), now_s)
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG", "DEBUG", "INFO", "DEBUG"]
    assert caplog.messages[3] == (
        "decode-1: TG batch of 8: 8 tokens in, 8 out, 100 of context, in 100.0 ms; 80 tokens/s in, 80 tokens/s out; "
        "24 of 64 blocks held, 8 running, 5 waiting; 3 batches since the last line"
    )
