"""What an orchestrator is told of one model at its start. Frozen, JSON-able; assembled in `cluster/config.py`."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvcache.hashing import HashAlgo
from pronghorn.credentials import TlsFiles
from pronghorn.errors import ConfigurationError

MEBIBYTE = 1024 * 1024


class OrchestratorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    redis_url: str
    key_prefix: str
    model_name: str
    """The model that this replica serves; nodes of another model are not its nodes."""
    model_path: str
    """A Hugging Face folder; only its tokenizer, chat template and generation defaults are read here."""
    max_length: int
    """Prompt plus output, in tokens, that a request may have."""

    default_deadline_s: float = 600.0
    max_in_flight: int = 256
    """Requests that may run on nodes at once."""
    max_queue: int = 1024
    """Requests that may wait; one more is refused as Overloaded, or takes the place of one with less right to it."""
    max_queue_bytes: int = 256 * MEBIBYTE
    """What those that wait may hold in memory, as far as it grows with their prompts."""
    max_queue_wait_s: float = 60.0
    """Who would wait longer is refused at once, and who has waited so long without a turn is told so."""
    starts_per_node: int = 32
    """Requests without a first token that may be on nodes at once, for each node that is usable; the others wait here,
    where priorities and shares count."""
    max_attempts: int = 3
    """Decode nodes tried before the first token."""
    migration_wait_s: float = 30.0
    """How long a stream that has lost its decode node waits for one to go on from, within its deadline."""
    reconnect_wait_s: float = 2.0
    """How long a request without a token waits where there is no decode node but one whose session has just broken: it
    may only have been cut, or this process held up for so long that its nodes gave it up."""
    breaker_failures: int = 3
    """A node that fails so often in a row gets no work for a while."""
    breaker_open_s: float = 1.0
    """For how long at first; twice as long after each trial that fails, up to eight times."""
    max_prefill_candidates: int = 3
    """Prefill nodes named to the decode node, best first."""
    retry_after_s: float = 1.0
    """What a refused client is told to wait."""
    max_request_bytes: int = 100 * MEBIBYTE
    most_urgent_priority: int = -100
    """The lowest `priority` that a client may send."""
    share_header: str = "authorization"
    """By whose value clients are told apart, in lower case: each value has the same share of the service."""
    use_client_cache_salt: bool = False
    tool_parser: str = "auto"
    """How the model writes tool calls; auto: by its chat template; none: calls are not read."""
    reasoning_parser: str = "auto"
    """How the model marks its thinking; likewise."""
    emit_reasoning_content: bool = False
    """Thinking is told as `reasoning_content` rather than `reasoning`."""
    structured_output: bool = True
    """Clients may send a response format."""
    logits_processors: list[str] = []
    """Names of the functions that the nodes' engines have."""
    prefix_caching: bool = True
    """Whether the nodes keep computed blocks; without it there is nothing to reset."""

    tls: TlsFiles | None = None
    """Mutual TLS with the nodes; None: plaintext."""
    operations_host: str | None = "127.0.0.1"
    """The interface of the operations port; None: the address by which the cluster knows the machine."""
    lease_s: float = 6.0
    """The registry forgets an orchestrator that has not refreshed its row for this long."""
    policy: str = "kv_aware"
    """By which nodes are chosen: one of `orchestrator.routing.policies.POLICIES`."""
    disaggregation: Literal["auto", "always"] = "auto"
    """Whether a decode node may compute a prompt itself while a prefill node could, where that is predicted to be
    clearly sooner."""
    hash_algo: HashAlgo = "sha256"
    kv_cache_hash_seed: str | None = None
    """64 hex digits; None: the seed that the cluster has made."""
    """As the nodes'."""
    block_index_bytes: int = 256 * MEBIBYTE

    heartbeat_timeout_s: float = 1.0
    """A node silent for longer, which are four heartbeats, gets no new work."""
    silence_timeout_s: float = 1.5
    """A session silent for longer is broken, and its attempts with it. Healthy nodes were heard every 0.25 to 0.35 s
    while both cores of their machine were saturated by engines (`bench/detection.py`)."""
    connect_timeout_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 2.0
    relist_period_s: float = 2.0
    """The registry is listed this often even where it announced no change."""
    send_queue_frames: int = 1024
    """Frames that may wait for the socket of one session."""
    drain_s: float = 30.0
    """How long a leaving replica waits for its requests before it fails them."""
    prefill_expected: bool = True
    """Whether a missing prefill pool is worth saying in `ready`; it never makes the replica unready."""

    def __post_init__(self) -> None:
        positive = (
            "max_length default_deadline_s max_in_flight max_queue_bytes max_queue_wait_s starts_per_node "
            "max_attempts migration_wait_s reconnect_wait_s "
            "breaker_failures breaker_open_s max_prefill_candidates retry_after_s max_request_bytes lease_s "
            "heartbeat_timeout_s block_index_bytes silence_timeout_s connect_timeout_s reconnect_min_s "
            "relist_period_s send_queue_frames"
        )
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be greater than 0", param=name)
        for name in ("max_queue", "drain_s"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must not be negative", param=name)
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ConfigurationError(
                f"reconnect_max_s is {self.reconnect_max_s}; below reconnect_min_s {self.reconnect_min_s}",
                param="reconnect_max_s",
            )


def parse_configs(raw: Sequence[dict[str, object]]) -> list[OrchestratorConfig]:
    """One a model, of one process: they share what its index of blocks may take. Raises as `parse_config`."""
    configs = [parse_config(one) for one in raw]
    return [msgspec.structs.replace(one, block_index_bytes=one.block_index_bytes // len(configs)) for one in configs]


def parse_config(raw: dict[str, object]) -> OrchestratorConfig:
    """`raw` as it came from JSON, checked. Raises ConfigurationError naming the field."""
    try:
        return msgspec.convert(raw, OrchestratorConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"orchestrator configuration: {error}") from error
