import numpy as np
import pytest

from pipelines.types.batch import BatchType, CompletedBatchStats, TextGenerationInputs
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer


def context(prompt: int, generated: int = 0, padding: bool = False) -> TextContext:
    tokens = TokenBuffer(np.zeros(prompt, dtype=np.int64))
    for _ in range(generated):
        tokens.advance_with_token(1)
    return TextContext(max_length=100, tokens=tokens, _is_padding_ctx=padding)


@pytest.mark.conformance(17, 19)
def test_an_empty_batch_is_tg_and_false() -> None:
    batch: TextGenerationInputs = TextGenerationInputs(batches=[[]])
    assert batch.batch_type is BatchType.TG and not batch and batch.input_tokens == 0


@pytest.mark.conformance(17, 18)
def test_figures_are_taken_at_construction_and_what_was_passed_is_overwritten() -> None:
    first, second = context(5), context(3, generated=2)
    batch = TextGenerationInputs(batches=[[first, second]], input_tokens=77, batch_type=BatchType.TG)
    assert (batch.input_tokens, batch.context_tokens, batch.batch_type) == (6, 4, BatchType.CE)
    first.update(1)
    assert (batch.input_tokens, batch.batch_type) == (6, BatchType.CE)


@pytest.mark.conformance(18, 19)
def test_padding_counts_for_the_device_only() -> None:
    batch = TextGenerationInputs(batches=[[context(3, 2)], [context(1, 1, padding=True)]])
    assert (batch.input_tokens, batch.context_tokens) == (2, 5)
    assert batch.per_replica_input_tokens == [1, 0] and batch.per_replica_context_tokens == [4, 0]
    assert batch.batch_size == 1 and len(batch.flat_batch) == 2
    assert batch.batch_type is BatchType.TG
    assert "padded=2" in repr(batch)
    assert TextGenerationInputs(batches=[[context(1, 1, padding=True)]])


@pytest.mark.conformance(19)
def test_log_probs_and_echo_of_a_batch() -> None:
    first, second = context(1), context(1)
    second.log_probabilities, second.log_probabilities_echo = 3, True
    batch = TextGenerationInputs(batches=[[first], [second]])
    assert batch.batch_top_log_probs == [0, 3] and batch.batch_echo == [False, True]
    assert batch.enable_log_probs and batch.enable_echo


def stats(kind: BatchType, seconds: float, out: int | None = None) -> CompletedBatchStats:
    return CompletedBatchStats(kind, 4, 100, 50, seconds, out)


@pytest.mark.conformance(20)
def test_throughput() -> None:
    assert stats(BatchType.CE, 2.0).prompt_throughput == 50
    assert stats(BatchType.TG, 2.0).generation_throughput == 2
    assert stats(BatchType.TG, 2.0, 12).generation_throughput == 6
    assert stats(BatchType.CE, 2.0, 12).generation_throughput == 2


@pytest.mark.conformance(20)
@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_no_throughput(seconds: float) -> None:
    assert stats(BatchType.TG, seconds, 3).generation_throughput == 0.0
    assert stats(BatchType.TG, seconds).prompt_throughput == 0.0
