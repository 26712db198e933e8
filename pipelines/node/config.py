"""What a node of either kind is told at its start. Frozen; assembled in `cluster/config.py` as plain data."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kvcache.hashing import parse_seed
from pipelines.runtime.config import EngineConfig
from pronghorn.credentials import TlsFiles
from pronghorn.errors import ConfigurationError

EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")


_USED_BY = {
    "host_offload_bytes": ("local", "tiered", "dkv"),
    "disk_offload_bytes": ("tiered", "dkv"),
    "disk_offload_dir": ("tiered", "dkv"),
}
"""Which connectors have a use for each setting of tiers."""


class TierBytes(NamedTuple):
    host: int
    disk: int


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: EngineConfig
    redis_url: str
    key_prefix: str
    """The cluster's share of Redis: every key of the registry begins with it."""
    host: str | None = "127.0.0.1"
    """The interface that the gRPC server binds; None: the address by which the cluster knows the machine."""
    port: int = 0
    """0: the operating system assigns one."""
    advertise_host: str | None = None
    """What others dial; `host` where unset. Needed where `host` means every interface."""
    kv_cache_hash_seed: str | None = None
    """64 hex digits, the same everywhere; None: the seed that the cluster has made. A secret, never logged."""
    directory_bytes: int = 256 << 20
    """Bound on what the directory of blocks takes of Redis's memory, all nodes together; 0: no directory."""
    kv_connector: Literal["null", "local", "tiered", "dkv"] = "dkv"
    """Where blocks come from, and go to, beside the pool: nowhere, this host's memory, that and disk, other nodes. With
    `dkv` what this node has in tiers of its own comes from there, the rest from others."""
    host_offload_bytes: int | None = None
    """Of memory for the tier of `local`, `tiered` and `dkv`; 0: no tier in memory. None: one and a half times the pool,
    with `dkv` no tier."""
    disk_offload_bytes: int | None = None
    """Of the disk for the tier of `tiered` and `dkv`; 0: no tier on disk. None: twice the pool, with `dkv` no tier."""
    disk_offload_dir: str | None = None
    """Needed with a tier on disk, refused where none could be; each node has a folder of its own in it, which goes with
    it."""
    lease_s: float = 6.0
    """The registry forgets a node that has not refreshed its row for this long; refreshed three times in it."""
    tls: TlsFiles | None = None
    """Mutual TLS on the gRPC server and with other nodes; None: plaintext."""
    connections_per_node: int = 4
    """TCP connections to each other node at most, among which streams from it are shared out; another is opened only
    while all that are open carry streams. Four streams move a tenth to a third more on four than one does on one, for
    the same processor time (docs/transfer.md)."""
    shared_memory: bool = False
    """Blocks go to and come from nodes on the same host, of the same user, through shared memory. Off where something
    that forwards every node's port is to see all that passes."""
    max_in_flight: int = 1024
    """Attempts that the node holds at once; one more is refused as Overloaded."""
    drain_timeout_s: float = 30.0
    """A node that leaves waits this long for what it runs. Serve's graceful shutdown must be longer."""
    stop_grace_s: float = 5.0
    """Bound on ending the server, and on ending the engine, once nothing runs any more."""
    unready_after_s: float = 10.0
    """A node whose engine is silent for this long, or that keeps something this long beyond its time, is not ready.
    Well above an engine's longest step."""
    batch_log_period_s: float = 10.0
    """The engine's batches are a line in the log this often at most."""

    def __post_init__(self) -> None:
        if self.host in EVERY_INTERFACE and self.advertise_host is None:
            raise ValueError(f"advertise_host: needed with host {self.host!r}, which nobody can dial")
        if self.kv_cache_hash_seed is not None:
            parse_seed(self.kv_cache_hash_seed)
        for name in ("directory_bytes", "host_offload_bytes", "disk_offload_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")
        self._check_tiers()
        for name in (
            "lease_s",
            "max_in_flight",
            "connections_per_node",
            "stop_grace_s",
            "unready_after_s",
            "batch_log_period_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")

    def _check_tiers(self) -> None:
        kind = self.kv_connector
        for name, kinds in _USED_BY.items():
            value = getattr(self, name)
            if value and kind not in kinds:
                raise ValueError(
                    f"{name}: {value} with kv_connector {kind!r}; only {', '.join(kinds)} have a use for it"
                )
        if self.disk_offload_dir is not None and kind == "dkv" and self.disk_offload_bytes is None:
            raise ValueError("disk_offload_bytes: needed with disk_offload_dir and kv_connector 'dkv'")
        if self.disk_offload_dir is None and self.tier_bytes(1).disk:
            raise ValueError("disk_offload_dir: needed for a tier on disk; or set disk_offload_bytes to 0")

    def tier_bytes(self, pool_bytes: int) -> TierBytes:
        """What the tiers of a node with a pool of this size may take, 0 for no tier."""
        host = pool_bytes * 3 // 2 if self.kv_connector in ("local", "tiered") else 0
        disk = pool_bytes * 2 if self.kv_connector == "tiered" else 0
        return TierBytes(
            host if self.host_offload_bytes is None else self.host_offload_bytes,
            disk if self.disk_offload_bytes is None else self.disk_offload_bytes,
        )

    def placed(self, machine: Callable[[], str]) -> "NodeConfig":
        """This on a machine: `machine()` is the address by which the cluster knows it."""
        if self.host is not None:
            return self
        address = machine()
        return msgspec.structs.replace(self, host=f"[{address}]" if ":" in address else address)

    @property
    def bind_host(self) -> str:
        assert self.host is not None, "the node has not been placed on a machine"
        return self.host

    @property
    def dial_host(self) -> str:
        return self.advertise_host or self.bind_host


ConfigType = TypeVar("ConfigType")


def parse_config(data: dict[str, Any], config_type: type[ConfigType]) -> ConfigType:
    """`data` (plain JSON data, as a Serve config carries it) checked into `config_type`.

    Raises ConfigurationError naming the field.
    """
    try:
        return msgspec.convert(data, config_type)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"node configuration: {error}") from error
