"""What an engine is told at its start. Frozen; assembled in `cluster/config.py`."""

from typing import Literal

import msgspec

from pronghorn.errors import ConfigurationError

SchedulingStrategy = Literal["prefill_first", "decode_first", "balanced", "per_replica"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_path: str
    """A Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file."""
    model_name: str
    """The identity of the model in registry rows, block hashes, routing and `/v1/models`."""
    num_blocks: int
    """Of each replica's pool."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """In which weights and keys and values are stored; arithmetic is float32."""
    device: str = "cpu"
    threads: int = 1
    block_tokens: int = 16
    max_batch_size: int = 32
    """Sequences that one replica computes; those whose prompts are being pulled count."""
    max_batch_input_tokens: int = 512
    """Tokens that one replica computes in a step; a longer prompt is computed in chunks of at most this. Without
    chunks the prompt that goes beyond it is the last one of its step."""
    max_batch_total_tokens: int | None = None
    """Tokens of context that the sequences of a step have in all, each counted up to a whole block, where a prompt is
    among them. None: no bound."""
    enable_chunked_prefill: bool = True
    chunked_prefill_min_chunk_size: int = 0
    """A prompt is not cut where either piece would have fewer tokens than this."""
    scheduling_strategy: SchedulingStrategy | None = None
    """Whether prompts or running sequences come first (`batching.py`). None: prompts on a prefill node, sequences on a
    decode node."""
    enable_in_flight_batching: bool | None = None
    """Whether a step that has room left takes the other kind in too. None: it does on a decode node."""
    kv_pressure_fraction: float = 0.9
    """Running sequences come first on a replica of whose blocks more than this are held."""
    max_passed_over_steps: int = 32
    """Prompts, or sequences, that were left out of this many steps in a row come first in the next."""
    data_parallel: int = 1
    """Replicas in this engine, each with a pool and a device of its own."""
    enable_dp_cross_replica_prefix_copy: bool = True
    """A replica copies cached blocks from another rather than computing them."""
    device_graph_capture: bool = False
    """A device replays steps of known size: with several replicas, padding makes their decode batches equally long."""
    max_waiting: int = 512
    """Requests that may wait for blocks or for their first chunk; one more is refused as Overloaded."""
    max_length: int | None = None
    """Prompt plus output, in tokens; the model's own limit where unset."""
    enable_prefix_caching: bool = True
    hash_algo: Literal["sha256", "sha256_64", "ahash64"] = "sha256"
    logits_processors: dict[str, str] = {}
    """Functions that requests may name: where each is found, as `package.module:attribute` (`logits_processors.py`)."""
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
        positive = ("num_blocks", "threads", "block_tokens", "max_batch_size", "max_waiting", "data_parallel")
        for name in (*positive, "max_passed_over_steps"):
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
        if not 0.0 <= self.kv_pressure_fraction <= 1.0:
            raise ValueError(f"kv_pressure_fraction: {self.kv_pressure_fraction} is not in 0..1")
        if self.data_parallel > 1 and ":" in self.device:
            raise ValueError(
                f"device: {self.device!r} is one device, and data_parallel ({self.data_parallel}) needs one of each "
                f"replica's own; leave the number away"
            )
        self._check_chunks()
        if self.max_length is not None:
            self.check_total_tokens(self.max_length)

    def _check_chunks(self) -> None:
        longest = (self.max_batch_input_tokens + 1) // 2
        if not 0 <= self.chunked_prefill_min_chunk_size <= longest:
            raise ValueError(
                f"chunked_prefill_min_chunk_size: {self.chunked_prefill_min_chunk_size} is not in 0..{longest}; above "
                f"half of max_batch_input_tokens ({self.max_batch_input_tokens}) some prompts could never be cut"
            )

    def check_total_tokens(self, max_length: int) -> None:
        """Raises ValueError where a sequence of `max_length`, the model's or the one configured, is out of bounds."""
        whole = -(-max_length // self.block_tokens) * self.block_tokens
        if self.max_batch_total_tokens is not None and self.max_batch_total_tokens < whole:
            raise ValueError(
                f"max_batch_total_tokens: {self.max_batch_total_tokens} is below max_length ({max_length}) counted up "
                f"to whole blocks of {self.block_tokens} tokens, {whole}"
            )

    @property
    def total_blocks(self) -> int:
        """In the block memory: replica r has the blocks from r * num_blocks on."""
        return self.num_blocks * self.data_parallel

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
