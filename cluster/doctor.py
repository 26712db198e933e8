"""What is wrong with a host or a cluster, and what to do about each: pure checks over facts that others gather.

A check takes the facts and gives its findings. What could not be learnt is a finding of its own or nothing, and never
counts as well. An error keeps a cluster from working, a warning may.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from cluster.config import MEBIBYTE

LEAST_PYTHON = (3, 11)
LEAST_REDIS = (6, 2)
CLOCK_SKEW_S = 1.0
SHARED_MEMORY_SPARE_BYTES = 64 * MEBIBYTE


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    python: tuple[int, int, int]
    system: str
    torch: str | None
    """Its version; None: it cannot be imported."""
    cuda_build: bool = False
    gpus: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    """What the configuration asks for."""
    nodes: int = 0
    """On this host, as far as is known; each takes a pool of KV memory."""
    pools_bytes: int = 0
    """Of all of them together."""
    available_bytes: int | None = None
    shared_bytes: int | None = None
    """Free in /dev/shm; None where there is none."""
    taken_ports: dict[str, int] = {}
    """By the option that would change it."""
    haproxy: bool = True
    redis_binary: bool = True
    needs_redis: bool = True


class RedisFacts(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    """Without its password."""
    error: str | None = None
    version: str = ""
    eviction: str | None = None
    """`maxmemory-policy`; None: it does not tell."""
    clock_skew_s: float = 0.0
    """Its clock less ours, at most half a round trip off."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    python: str
    ray: str
    torch: str | None
    clock_skew_s: float
    unreachable: list[str] = []
    """Addresses of machines that cannot be reached from there."""


class RayFacts(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    error: str | None = None
    ray: str = ""
    """Of this host."""
    dead: list[str] = []
    silent: list[str] = []
    """Machines that are alive for Ray, on which nothing could be run."""
    machines: list[MachineFacts] = []


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    host: HostFacts
    redis: RedisFacts | None = None
    ray: RayFacts | None = None


class Finding(msgspec.Struct, frozen=True):
    check: str
    level: Literal["error", "warning"]
    what: str
    remedy: str


Found = Iterator[tuple[Literal["error", "warning"], str, str]]


def python(facts: Facts) -> Found:
    if facts.host.python[:2] < LEAST_PYTHON:
        found = ".".join(map(str, facts.host.python))
        yield "error", f"Python is {found}; 3.11 is needed", "make the environment anew with a newer Python"


def torch(facts: Facts) -> Found:
    host = facts.host
    if host.torch is None:
        yield "error", "torch cannot be imported", "install what pyproject.toml names: make install"
    elif host.device == "cuda" and not host.cuda_build:
        yield "error", f"torch {host.torch} is a build for CPUs, and --device is cuda", "install torch's CUDA build"
    elif host.device == "cuda" and host.gpus == 0 and facts.ray is None:
        yield "error", "no GPU can be used, and --device is cuda", "look at nvidia-smi and the driver, or --device cpu"
    elif host.device == "cpu" and host.gpus:
        yield "warning", f"{host.gpus} GPUs are here, and --device is cpu", "give --device cuda to use them"


def memory(facts: Facts) -> Found:
    host = facts.host
    if host.available_bytes is not None and host.pools_bytes > host.available_bytes:
        yield (
            "error",
            f"the KV pools of {host.nodes} nodes ask for {_mib(host.pools_bytes)} and {_mib(host.available_bytes)} are "
            "available",
            "give less --kv-memory or fewer nodes, or end what else runs here",
        )


def shared_memory(facts: Facts) -> Found:
    free = facts.host.shared_bytes
    if free is not None and free < SHARED_MEMORY_SPARE_BYTES:
        yield (
            "error",
            f"/dev/shm has {_mib(free)} free; Ray's object store needs {_mib(SHARED_MEMORY_SPARE_BYTES)}",
            "give the container more (--shm-size, or an emptyDir of medium Memory), or remove what lies there",
        )


def ports(facts: Facts) -> Found:
    for option, port in sorted(facts.host.taken_ports.items()):
        yield "error", f"port {port} is in use by another program", f"choose another with {option}"


def edge(facts: Facts) -> Found:
    if not facts.host.haproxy:
        yield (
            "warning",
            "HAProxy does not run here; Serve's own proxy is slower under load",
            "install a haproxy binary of 2.8 or newer, or keep --edge auto",
        )


def redis(facts: Facts) -> Found:
    found = facts.redis
    if found is None:
        if facts.host.needs_redis and not facts.host.redis_binary:
            yield "error", "this host has no Redis server", "install redis or valkey, or give --redis-url"
        return
    if found.error is not None:
        yield "error", f"Redis cannot be reached at {found.url}: {found.error}", "start it, or correct --redis-url"
        return
    version = tuple(int(part) for part in found.version.split(".")[:2] if part.isdecimal())
    if version < LEAST_REDIS:
        yield "error", f"Redis at {found.url} is {found.version}; 6.2 is needed", "use a newer Redis or Valkey"
    if found.eviction is None:
        yield "warning", f"Redis at {found.url} does not tell its eviction policy", "see that it is noeviction"
    elif found.eviction != "noeviction":
        yield (
            "error",
            f"Redis at {found.url} evicts keys when it is full ({found.eviction}); the node registry would lose nodes",
            "CONFIG SET maxmemory-policy noeviction, and enough maxmemory; block rows are bounded by ourselves",
        )
    yield from _clock(f"Redis at {found.url}", found.clock_skew_s)


def ray(facts: Facts) -> Found:
    found = facts.ray
    if found is None:
        return
    if found.error is not None:
        yield "error", found.error, "see that the Ray cluster runs, and that this host has its version and its token"
        return
    for address in found.dead:
        yield "warning", f"the machine {address} is dead for Ray", "start Ray there again, or leave it"
    for address in found.silent:
        yield (
            "error",
            f"on the machine {address} nothing could be run in time",
            "see that its Python has what this host's has, and that it is not overloaded",
        )
    here = found.machines[0] if found.machines else None
    for machine in found.machines:
        if machine.ray != found.ray:
            yield "error", f"{machine.address} has Ray {machine.ray}, this host {found.ray}", "install one version"
        if here is not None and machine.python != here.python:
            yield (
                "error",
                f"{machine.address} has Python {machine.python}, {here.address} {here.python}",
                "use one Python",
            )
        if here is not None and machine.torch != here.torch:
            yield (
                "warning",
                f"{machine.address} has torch {machine.torch}, {here.address} {here.torch}",
                "use one torch",
            )
        for other in machine.unreachable:
            yield (
                "error",
                f"{other} cannot be reached from {machine.address}: nodes there could not exchange blocks",
                "let all ports pass between them; where the address is the wrong one, start Ray with --node-ip-address",
            )
        yield from _clock(machine.address, machine.clock_skew_s)


def _clock(whose: str, skew_s: float) -> Found:
    if abs(skew_s) > CLOCK_SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        yield (
            "warning",
            f"the clock of {whose} is {abs(skew_s):.1f} s {ahead} this host's; logs and traces will not fit together",
            "run an NTP client on both",
        )


def _mib(count: int) -> str:
    return f"{count // MEBIBYTE} MiB"


CHECKS: tuple[Callable[[Facts], Found], ...] = (python, torch, memory, shared_memory, ports, edge, redis, ray)


def diagnose(facts: Facts) -> list[Finding]:
    return [Finding(check.__name__, level, what, remedy) for check in CHECKS for level, what, remedy in check(facts)]
