"""The facts that `doctor.py` judges: asked of this host, of Redis and of Ray. No answer is a fact too."""

import asyncio
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from cluster import redis_server
from cluster.config import ClusterConfig
from cluster.config_problems import redacted
from cluster.die_with_parent import bound
from cluster.doctor import Facts, HostFacts, RayFacts, RedisFacts
from cluster.launch import choose_edge, haproxy_version
from cluster.ports import is_free
from cluster.preconditions import require_ray
from kvcache.available_memory import available_bytes
from kvcache.redis_server_facts import ServerFacts, ask_server
from pronghorn.errors import ConfigurationError, Unavailable

RAY_LIMIT_S = 180.0
TORCH_LIMIT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
TORCH_SAYS = "import torch; print(torch.__version__, int(torch.version.cuda is not None), torch.cuda.device_count())"


def gather(config: ClusterConfig, environ: Mapping[str, str]) -> Facts:
    ray = None if config.address is None else _ray(config.address, environ)
    redis = None if config.own_redis else _redis(config.service.redis_url)
    return Facts(host=_host(config), redis=redis, ray=ray)


def _host(config: ClusterConfig) -> HostFacts:
    models, alone = config.service.each, config.address is None
    counts = [model.prefill + model.decode if alone else 0 for model in models]
    torch, cuda_build, gpus = _torch()
    wanted = {"--port": (config.host, config.port), "--dashboard-port": ("127.0.0.1", config.dashboard_port)}
    taken = {o: port for o, (host, port) in wanted.items() if alone and port and not is_free(host, port)}
    return HostFacts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        torch=torch,
        cuda_build=cuda_build,
        gpus=gpus,
        device="cuda" if any(model.device == "cuda" for model in models) else "cpu",
        nodes=sum(counts),
        pools_bytes=sum(n * model.kv_memory_bytes for n, model in zip(counts, models, strict=True)),
        available_bytes=available_bytes(),
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        taken_ports=taken,
        haproxy=not alone or choose_edge("auto", haproxy_version) == "haproxy",
        redis_binary=_has_redis_binary(),
        needs_redis=config.own_redis,
    )


def _torch() -> tuple[str | None, bool, int]:
    """Its version, whether it is a build for CUDA, how many GPUs it sees; in a process of its own, as it is large."""
    command = [sys.executable, "-P", "-c", TORCH_SAYS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=True)
        version, cuda_build, gpus = done.stdout.split()
    except (subprocess.SubprocessError, OSError, ValueError):
        return None, False, 0
    return version, cuda_build == "1", int(gpus)


def _has_redis_binary() -> bool:
    try:
        redis_server.find_binary()
    except ConfigurationError:
        return False
    return True


def _redis(url: str) -> RedisFacts:
    began_s = time.time()
    try:
        said: ServerFacts = asyncio.run(ask_server(url))
    except (Unavailable, ConfigurationError) as error:
        return RedisFacts(url=redacted(url), error=error.message)
    nearest_s = min(max(said.time_s, began_s), time.time())  # 0 where its time lies within the call
    skew_s = said.time_s - nearest_s
    return RedisFacts(url=redacted(url), version=said.version, eviction=said.eviction, clock_skew_s=skew_s)


def _ray(address: str, environ: Mapping[str, str]) -> RayFacts:
    version = metadata.version("ray")
    try:
        require_ray(address)
    except ConfigurationError as error:
        return RayFacts(address=address, ray=version, error=error.message)
    command = bound([sys.executable, "-P", "-m", "cluster.doctor_machines", address])
    settings = {"RAY_gcs_server_port_wait_time_s": "5", **environ}
    try:
        done = subprocess.run(command, env=settings, capture_output=True, timeout=RAY_LIMIT_S, check=True)
        return msgspec.json.decode(done.stdout, type=RayFacts)
    except subprocess.TimeoutExpired:
        return RayFacts(
            address=address, ray=version, error=f"Ray at {address} does not answer within {RAY_LIMIT_S:.0f} s"
        )
    except (subprocess.CalledProcessError, msgspec.DecodeError):
        return RayFacts(address=address, ray=version, error=f"Ray's client ended when it was asked about {address}")
