"""What an engine is told at its start. Frozen; assembled in `cluster/config.py`."""

from typing import Literal

import msgspec

from pronghorn.errors import ConfigurationError


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_path: str
    """A Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file."""
    model_name: str
    """The identity of the model in registry rows, block hashes, routing and `/v1/models`."""
    num_blocks: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int = 1
    block_tokens: int = 16
    max_batch_size: int = 32
    """Sequences in one step."""
    max_batch_input_tokens: int = 512
    """Tokens in one step; a longer prompt is computed in chunks of at most this."""
    max_waiting: int = 512
    """Requests that may wait for blocks or for their first chunk; one more is refused as Overloaded."""
    max_length: int | None = None
    """Prompt plus output, in tokens; the model's own limit where unset."""
    enable_prefix_caching: bool = True
    hash_algo: Literal["sha256", "sha256_64", "ahash64"] = "sha256"
    report_period_s: float = 0.25
    stall_timeout_s: float = 60.0
    """An engine with work that reports nothing for this long counts as stuck."""
    tensor_parallel: int = 1
    """Devices that share each layer. Other than 1 is refused, as are the two below: none of them is built."""
    lora: str | None = None
    """A folder of adapters."""
    speculative: str | None = None
    """A folder of a draft model."""

    def __post_init__(self) -> None:
        self._refuse_what_is_not_built()
        for name in ("num_blocks", "threads", "block_tokens", "max_batch_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.max_batch_input_tokens < self.max_batch_size:
            raise ValueError(
                f"max_batch_input_tokens: {self.max_batch_input_tokens} is below max_batch_size "
                f"({self.max_batch_size}), so that a step could not hold a token of every sequence"
            )
        for name in ("report_period_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")

    def _refuse_what_is_not_built(self) -> None:
        """Raises ConfigurationError that names the feature and the field: nothing that was asked for is left out."""
        for field, feature, neutral in (
            ("tensor_parallel", "tensor parallelism", 1),
            ("lora", "LoRA", None),
            ("speculative", "speculative decoding", None),
        ):
            value = getattr(self, field)
            if value != neutral:
                raise ConfigurationError(
                    f"{feature} is not supported: {field} is {value!r} and must be left at {neutral!r}", param=field
                )
