from typing import Any

import msgspec
import pytest

from pipelines.runtime.config import EngineConfig
from pronghorn.errors import ConfigurationError

LEAST = {"model_path": "/model", "model_name": "m", "num_blocks": 8}


@pytest.mark.conformance(30)
def test_the_least_that_is_needed_is_enough() -> None:
    config = msgspec.convert(LEAST, EngineConfig)
    assert (config.block_tokens, config.enable_prefix_caching, config.hash_algo) == (16, True, "sha256")
    assert (config.tensor_parallel, config.lora, config.speculative) == (1, None, None)


@pytest.mark.field("TensorRT-LLM#18156")
@pytest.mark.parametrize(
    ("field", "value", "feature"),
    [
        ("tensor_parallel", 2, "tensor parallelism"),
        ("tensor_parallel", 0, "tensor parallelism"),
        ("lora", "/adapters", "LoRA"),
        ("lora", "", "LoRA"),
        ("speculative", "/draft", "speculative decoding"),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: Any, feature: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{feature} is not supported: {field} is {value!r}") as caught:
        msgspec.convert({**LEAST, field: value}, EngineConfig)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_batch_input_tokens": 8}, "max_batch_input_tokens: 8 is below max_batch_size"),
        ({"stall_timeout_s": 0}, "stall_timeout_s"),
        ({"dtype": "int4"}, "dtype"),
        ({"draft_model": "/d"}, "draft_model"),
    ],
)
def test_what_is_out_of_bounds_or_unknown_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert({**LEAST, **changes}, EngineConfig)
