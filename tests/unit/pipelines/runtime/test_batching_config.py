"""What the configuration refuses about batches and replicas, by the names at fault."""

from typing import Any

import msgspec
import pytest

from pipelines.runtime.config import EngineConfig

LEAST: dict[str, Any] = {"model_path": "/model", "model_name": "m", "num_blocks": 8}


def config(**changes: Any) -> EngineConfig:
    return msgspec.convert({**LEAST, **changes}, EngineConfig)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: 0 is not above 0"),
        ({"data_parallel": 0}, "data_parallel: 0 is not above 0"),
        ({"max_passed_over_steps": 0}, "max_passed_over_steps: 0 is not above 0"),
        ({"max_batch_input_tokens": 31}, r"max_batch_input_tokens: 31 is below max_batch_size \(32\)"),
        ({"kv_pressure_fraction": 1.1}, r"kv_pressure_fraction: 1.1 is not in 0..1"),
        ({"kv_pressure_fraction": -0.1}, r"kv_pressure_fraction: -0.1 is not in 0..1"),
        ({"chunked_prefill_min_chunk_size": -1}, "chunked_prefill_min_chunk_size: -1 is not in 0..256"),
        (
            {"chunked_prefill_min_chunk_size": 257},
            r"chunked_prefill_min_chunk_size: 257 is not in 0..256.*max_batch_input_tokens \(512\)",
        ),
        (
            {"max_length": 1000, "max_batch_total_tokens": 1007},
            r"max_batch_total_tokens: 1007 is below max_length \(1000\) counted up to whole blocks of 16 tokens, 1008",
        ),
        ({"scheduling_strategy": "fifo"}, "scheduling_strategy"),
        ({"device": "cuda:1", "data_parallel": 2}, "device: 'cuda:1' is one device, and data_parallel"),
    ],
)
@pytest.mark.conformance(50)
def test_a_limit_out_of_bounds_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        config(**changes)


def test_a_prompt_of_any_length_can_be_cut_at_the_largest_least_chunk() -> None:
    for budget in (32, 33):
        config(max_batch_input_tokens=budget, chunked_prefill_min_chunk_size=(budget + 1) // 2)


def test_the_models_own_length_is_held_against_the_total_context() -> None:
    bounded = config(max_length=1000, max_batch_total_tokens=1008)
    with pytest.raises(ValueError, match=r"max_batch_total_tokens: 1008 is below max_length \(4096\)"):
        bounded.check_total_tokens(4096)
    config().check_total_tokens(1 << 20)


def test_each_replica_has_its_share_of_the_block_memory() -> None:
    assert (config().total_blocks, config(data_parallel=3).total_blocks) == (8, 24)
