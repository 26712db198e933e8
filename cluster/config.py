"""Every setting of a cluster, checked whole, and the only place that reads the environment.

`ServiceConfig` says what is served: plain data, the `args` of the Serve application (`cluster.build:app`).
`ClusterConfig` adds where and how `pronghorn up` brings it up. Both translate into what the engine, the nodes and the
orchestrator are told; none of those sees a flag or a variable.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cluster.config_problems import Problem, Refused, checked, refuse, wrong
from cluster.model_config import ModelConfig, problems_of_names
from cluster.setting_types import (
    Count,
    CountOrNone,
    Device,
    Disaggregation,
    Dtype,
    Edge,
    HeaderName,
    Placements,
    Port,
    Positive,
    Priority,
    ProxyLocation,
    Scheduling,
)
from kvcache.hashing import HashAlgo, parse_seed
from kvcache.layout import KVLayout
from orchestrator.routing.policies import POLICIES
from pipelines.models.config import read_config
from pipelines.node.config import NodeConfig
from pipelines.runtime.config import EngineConfig
from pipelines.text.reasoning_parser import reasoning_format
from pipelines.text.tool_format import tool_format
from pronghorn.credentials import Credentials, TlsFiles
from pronghorn.errors import ConfigurationError

MEBIBYTE = 1024 * 1024
APPLICATION_NAME = "pronghorn"
DEFAULT_CLUSTER_NAME = "default"
DEFAULT_PORT = 8000
DEFAULT_DASHBOARD_PORT = 8265
MIN_BLOCKS = 8
"""Fewer blocks than this hold no conversation; a pool so small is a mistake in a unit."""

HOME_VARIABLE = "PRONGHORN_HOME"
CACHE_VARIABLE = "PRONGHORN_CACHE"
REDIS_VARIABLE = "REDIS_URL"


class ServiceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model_path: str
    """A Hugging Face folder that every host of the cluster can read; empty with `models`."""
    model_name: str
    """What clients call it; empty with `models`."""
    models: dict[str, ModelConfig] = {}
    """Several models, by what clients call them; what one of them leaves out is as below. Empty: the one above."""
    redis_url: str
    key_prefix: str
    prefill: CountOrNone = 1
    decode: Count = 1
    orchestrators: Count = 1
    kv_memory_bytes: Count = 512 * MEBIBYTE
    """Of each node."""
    block_tokens: Count = 16
    dtype: Dtype = "float32"
    device: Device = "cpu"
    threads: Count = 1
    """Of each engine; its data-parallel replicas share them."""
    data_parallel: Count = 1
    """Replicas of the model in each engine, among which requests are shared out; they share the node's KV memory."""
    chunk_tokens: Count | None = None
    """Tokens in one engine step, which bounds a prefill chunk; None: what suits the device."""
    max_batch_size: Count = 32
    max_in_flight: Count = 256
    """Requests that one orchestrator runs at once."""
    max_queue: CountOrNone = 1024
    """Requests that may wait in one orchestrator (docs/overload.md)."""
    max_queue_bytes: Count = 256 * MEBIBYTE
    """What those may hold in memory."""
    max_queue_wait_s: Positive = 60.0
    """Who would wait longer is refused at once."""
    starts_per_node: Count = 32
    """Requests without a first token that one orchestrator may have on nodes, for each usable node."""
    most_urgent_priority: Priority = -100
    """The lowest `priority` that a client may send; 0 where no gateway is trusted to set it."""
    share_header: HeaderName = "authorization"
    """The header by whose value clients are told apart: each value has the same share of the service."""
    max_length: Count | None = None
    prefix_caching: bool = True
    tool_parser: str = "auto"
    """How the model writes tool calls (docs/structured-output.md); auto: by its chat template."""
    reasoning_parser: str = "auto"
    """How the model marks its thinking; likewise."""
    emit_reasoning_content: bool = False
    """Thinking is told as `reasoning_content` rather than `reasoning`."""
    structured_output: bool = True
    """Clients may send a response format."""
    policy: str = "kv_aware"
    """By which nodes are chosen for a request: one of `orchestrator.routing.policies.POLICIES`."""
    disaggregation: Disaggregation = "auto"
    """auto: a decode node computes a prompt itself where that is predicted to be clearly sooner; always: never while a
    prefill node could."""
    kv_cache_hash_algo: HashAlgo = "sha256"
    kv_cache_hash_seed: str | None = None
    """64 hex digits, a secret; None: the cluster makes a seed at its first start and keeps it."""
    use_client_cache_salt: bool = False
    """Honour `cache_salt` and `X-Cache-Salt`; only behind a gateway that is trusted to set them."""
    node_settings: dict[str, Any] = {}
    """Further fields of `NodeConfig`, such as `kv_connector` and its budgets, by name."""
    engine_settings: dict[str, Any] = {}
    """Further fields of `EngineConfig`, such as its scheduling policy, by name."""
    deadline_s: Positive = 600.0
    drain_timeout_s: Positive = 30.0
    revision: int = 0
    """Counts rolling redeployments: Serve replaces every replica of an application whose arguments have changed."""
    node_host: str | None = None
    """The interface of the nodes' gRPC servers; None: the address by which Ray knows each node's machine."""
    tls: TlsFiles | None = None
    """Mutual TLS between nodes and orchestrators, from files that every host has at these paths; None: plaintext."""
    shared_memory: bool = True
    """Whether nodes on one host exchange blocks through shared memory; never where `advertise_host` is set."""
    advertise_host: str | None = None
    """What others dial instead, where something that forwards every node's port stands before the nodes."""

    placement: Placements = Placements()
    """Where each pool may be, on a Ray cluster of several machines."""

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[Problem]:
        shared = list(self._problems_of_one())
        yield from shared
        if self.models:
            for field in ("model_path", "model_name"):
                if getattr(self, field):
                    yield wrong(field, getattr(self, field), "left out where there are models")
            yield from problems_of_names(self.models)
        for name in self.models:
            try:
                self.alone(name)
            except Refused as refused:
                for problem in refused.problems:
                    if problem not in shared:
                        yield Problem(f"models.{name}.{problem.path}", f"models.{name}.{problem.text}")

    def _problems_of_one(self) -> Iterator[Problem]:
        if self.policy not in POLICIES:
            yield wrong("policy", self.policy, f"one of {', '.join(POLICIES)}")
        for find, field in ((tool_format, "tool_parser"), (reasoning_format, "reasoning_parser")):
            try:
                find(getattr(self, field), None)
            except ConfigurationError as error:
                yield Problem(field, error.message)
        if self.use_client_cache_salt and "ahash64" in (
            self.kv_cache_hash_algo,
            self.engine_settings.get("hash_algo"),
        ):
            yield Problem(
                "use_client_cache_salt",
                "use_client_cache_salt is on with kv_cache_hash_algo ahash64, which cannot honour salts: tenants would "
                "share blocks; use sha256 or sha256_64",
            )
        if self.kv_cache_hash_seed is not None:
            try:
                parse_seed(self.kv_cache_hash_seed)
            except ValueError as error:
                yield Problem("kv_cache_hash_seed", f"kv_cache_hash_seed: {error}")

    def alone(self, name: str) -> "ServiceConfig":
        """As that one of `models` is served: its own settings in their places, and no `models`."""
        own = self.models[name]
        merged = own.over(msgspec.structs.asdict(self))
        return ServiceConfig(**merged | {"models": {}, "model_name": name, "model_path": own.path})

    @property
    def each(self) -> "list[ServiceConfig]":
        """One a model, none of them with `models`."""
        return [self.alone(name) for name in self.models] or [self]


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = DEFAULT_CLUSTER_NAME
    model: str | None = None
    """A Hugging Face folder, GGUF file or hub name, whose folder is `service.model_path`; None: the default model."""
    service: ServiceConfig
    host: str = "127.0.0.1"
    port: Port = DEFAULT_PORT
    dashboard_port: Port | None = None
    """None: 8265 where it is free, else one that the operating system assigns."""
    address: str | None = None
    """A Ray cluster to join; None: start one."""
    scheduling: Scheduling = "spread"
    """Of a Serve that we start on a Ray cluster that we join: over its machines, or onto as few as will do."""
    proxy_location: ProxyLocation = "EveryNode"
    """Where Serve takes HTTP: on each machine with a replica, or on the head alone."""
    edge: Edge = "auto"
    startup_timeout_s: Positive = 300.0

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[Problem]:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", self.name):
            yield Problem(
                "name", f"the cluster name {self.name!r} must be 1 to 32 lower-case letters, digits and dashes"
            )
        if self.model is not None and self.service.models:
            yield Problem("model", f"model is {self.model!r} beside service.models; name it there")
        if self.address is not None and self.own_redis:
            yield Problem(
                "service.redis_url",
                f"--address {self.address} joins a Ray cluster, whose other hosts cannot reach a Redis server on this "
                "one: name a Redis that all of them reach with --redis-url",
            )

    @property
    def own_redis(self) -> bool:
        """Whether we start the Redis server; `service.redis_url` is filled in once it has a port."""
        return not self.service.redis_url


Config = TypeVar("Config", ServiceConfig, ClusterConfig)


def parse(raw: Mapping[str, Any], kind: type[Config]) -> Config:
    """Plain data, checked whole. Raises ConfigurationError, a line for each problem."""
    return checked(raw, kind)


def with_redis(service: ServiceConfig, environ: Mapping[str, str]) -> ServiceConfig:
    """`service` with the Redis that the environment names, where it names none itself."""
    if service.redis_url:
        return service
    if not (url := environ.get(REDIS_VARIABLE)):
        raise ConfigurationError(f"redis_url is empty, and {REDIS_VARIABLE} is not set", param="redis_url")
    return msgspec.structs.replace(service, redis_url=url)


# --- what the rooms below are told -----------------------------------------------------------------------------------


def kv_layout(service: ServiceConfig) -> KVLayout:
    """Reads the model's config.json and no weights."""
    model = read_config(Path(service.model_path))
    return KVLayout(
        model=service.model_name,
        dtype=service.dtype,
        block_tokens=service.block_tokens,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def num_blocks(service: ServiceConfig) -> int:
    """Of each replica. Raises ConfigurationError, with both numbers, where they are too few to serve anything."""
    block_bytes = service.data_parallel * kv_layout(service).block_bytes
    count = service.kv_memory_bytes // block_bytes
    if count < MIN_BLOCKS:
        raise ConfigurationError(
            f"--kv-memory gives each node {service.kv_memory_bytes / MEBIBYTE:.1f} MiB, room for {count} blocks a "
            f"replica; at least {MIN_BLOCKS} blocks of {service.block_tokens} tokens are needed, which is "
            f"{MIN_BLOCKS * block_bytes / MEBIBYTE:.1f} MiB",
            param="kv_memory",
        )
    return count


def max_length(service: ServiceConfig) -> int:
    """Prompt plus output, in tokens: the least of what was asked, what the model knows, and what the pool can hold."""
    known = read_config(Path(service.model_path)).max_positions
    if service.max_length is not None and service.max_length > known:
        raise ConfigurationError(f"--max-length is {service.max_length}; the model knows {known} positions")
    return min(service.max_length or known, known, num_blocks(service) * service.block_tokens)


def engine(service: ServiceConfig) -> dict[str, Any]:
    """An `EngineConfig` as plain data, checked. Raises ConfigurationError naming the setting at fault."""
    chunk = service.chunk_tokens or (2048 if service.device == "cuda" else 512)
    settings: dict[str, Any] = {
        "model_path": service.model_path,
        "model_name": service.model_name,
        "num_blocks": num_blocks(service),
        "dtype": service.dtype,
        "device": service.device,
        "threads": max(1, service.threads // service.data_parallel),
        "data_parallel": service.data_parallel,
        "block_tokens": service.block_tokens,
        "max_batch_size": service.max_batch_size,
        "max_batch_input_tokens": max(chunk, service.max_batch_size),
        "max_length": max_length(service),
        "enable_prefix_caching": service.prefix_caching,
    }
    if taken := settings.keys() & service.engine_settings:
        raise ConfigurationError(f"engine_settings: {min(taken)} has an option of its own", param=min(taken))
    # Replicas of a node that prefills for itself need not do the same kind of work in a step.
    strategy = {"scheduling_strategy": "per_replica"} if service.prefill == 0 else {}
    settings = settings | strategy | {"hash_algo": service.kv_cache_hash_algo} | service.engine_settings
    try:
        msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"engine settings: {error}") from None
    return settings


def node(service: ServiceConfig) -> dict[str, Any]:
    """The same for either kind of node. Raises ConfigurationError naming the setting at fault."""
    settings: dict[str, Any] = {
        "engine": engine(service),
        "redis_url": service.redis_url,
        "key_prefix": service.key_prefix,
        "host": service.node_host,
        "advertise_host": service.advertise_host,
        "tls": None if service.tls is None else msgspec.structs.asdict(service.tls),
        "shared_memory": service.shared_memory and service.advertise_host is None,
        "drain_timeout_s": service.drain_timeout_s,
        "kv_cache_hash_seed": service.kv_cache_hash_seed,
    }
    if taken := settings.keys() & service.node_settings:
        raise ConfigurationError(f"node_settings: {min(taken)} has an option of its own", param=min(taken))
    settings |= service.node_settings
    try:
        msgspec.convert(settings, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"node settings: {error}") from None
    return settings


def orchestrator(service: ServiceConfig) -> dict[str, Any]:
    """For one model. What an orchestrator knows of the nodes' blocks is bounded over all of its models."""
    return {
        "redis_url": service.redis_url,
        "key_prefix": service.key_prefix,
        "model_name": service.model_name,
        "model_path": service.model_path,
        "max_length": max_length(service),
        "operations_host": service.node_host,
        "tls": None if service.tls is None else msgspec.structs.asdict(service.tls),
        "max_in_flight": service.max_in_flight,
        "max_queue": service.max_queue,
        "max_queue_bytes": service.max_queue_bytes,
        "max_queue_wait_s": service.max_queue_wait_s,
        "starts_per_node": service.starts_per_node,
        "most_urgent_priority": service.most_urgent_priority,
        "share_header": service.share_header.lower(),
        "default_deadline_s": service.deadline_s,
        "drain_s": service.drain_timeout_s,
        "logits_processors": sorted(service.engine_settings.get("logits_processors", {})),
        "prefill_expected": service.prefill > 0,
        "prefix_caching": service.prefix_caching,
        "tool_parser": service.tool_parser,
        "reasoning_parser": service.reasoning_parser,
        "emit_reasoning_content": service.emit_reasoning_content,
        "structured_output": service.structured_output,
        "policy": service.policy,
        "disaggregation": service.disaggregation,
        "hash_algo": engine(service)["hash_algo"],
        "kv_cache_hash_seed": service.kv_cache_hash_seed,
        "use_client_cache_salt": service.use_client_cache_salt,
    }


def parse_setting(text: str) -> tuple[str, Any]:
    """ "name=value", the value as JSON where it is that, else as text. Raises ConfigurationError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigurationError(f"--set is {text!r}; write it as name=value")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def tls_in(folder: str) -> dict[str, str]:
    """The files of a folder, as plain data. Raises ConfigurationError where they cannot be used."""
    files = TlsFiles.in_folder(str(Path(folder).expanduser().resolve()))
    Credentials(files)
    return dict(msgspec.structs.asdict(files))


_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": MEBIBYTE, "gib": 1024 * MEBIBYTE}


def parse_bytes(text: str, option: str) -> int:
    """ "512MiB", "1.5 GiB" or plain bytes. Raises ConfigurationError naming `option`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise ConfigurationError(f"{option} is {text!r}; write a size as 512MiB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])


# --- the environment -------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """A copy of this process's environment, from which that of its children is made."""
    return dict(os.environ)


def home(environ: Mapping[str, str]) -> Path:
    """Where the folders of running clusters lie."""
    if given := environ.get(HOME_VARIABLE):
        return Path(given).expanduser().resolve()
    return temp_base() / f"pronghorn-{os.getuid()}"


def temp_base() -> Path:
    """A folder for temporary things with the shortest path that there is: a Unix socket's takes 107 bytes at most."""
    short = Path("/tmp")
    return short if short.is_dir() and os.access(short, os.W_OK) else Path(tempfile.gettempdir())


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where fetched and converted models are kept."""
    if given := environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().resolve()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pronghorn" / "models"


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
