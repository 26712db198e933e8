"""The Serve replicas' classes, driven as Serve drives them, with a real registry and engines in real processes."""

import asyncio
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from kvcache.layout import KVLayout
from kvcache.redis_registry import RedisRegistry
from pronghorn.errors import ConfigurationError
from tests.fakes.canary_engine import canary_config
from tests.fakes.canary_pipeline import KV_BYTES
from tests.fakes.valkey_server import ValkeyServer

with warnings.catch_warnings():  # Ray's modules warn of their own ways when they are imported
    warnings.simplefilter("ignore")
    import decode_nodes.deployment
    import prefill_nodes.deployment

# The interpreter calls `__del__` once more when the object goes; Serve has awaited it by then.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .*__del__:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pn-") as folder:
        server = ValkeyServer(Path(folder))
        server.start()
        yield server.url
        server.stop()


@pytest.fixture(params=["decode", "prefill"])
def deployment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, with a canary for its engine and a replica's context as Serve would give it."""
    module = {"decode": decode_nodes.deployment, "prefill": prefill_nodes.deployment}[request.param]
    canary = KVLayout("canary", "float32", 4, num_layers=1, num_kv_heads=1, head_dim=KV_BYTES // 8)
    assert canary.block_bytes == 4 * KV_BYTES
    monkeypatch.setattr(module, "ENGINE", f"tests.fakes.canary_{request.param}")
    monkeypatch.setattr(module, "layout_of", lambda config: canary)
    context = SimpleNamespace(deployment=request.param, replica_tag="a1b2c3")
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    return getattr(module, f"{request.param.title()}NodeDeployment")


def config(redis_url: str, **changes: Any) -> dict[str, Any]:
    engine = msgspec.to_builtins(canary_config())
    node = {"engine": engine, "redis_url": redis_url, "key_prefix": "t:", "drain_timeout_s": 2.0}
    return {"node": {**node, **changes}}


async def test_a_replica_comes_registers_when_healthy_and_leaves_nothing(deployment: Any, redis_url: str) -> None:
    registry = RedisRegistry(redis_url, "t:")
    before = set(psutil.Process().children())
    replica = object.__new__(deployment)
    await replica.__init__(config(redis_url))
    assert await registry.list() == []
    await replica.check_health()
    async with asyncio.timeout(60.0):
        async for _ in registry.changes():
            if records := await registry.list():
                break
    [record] = records
    assert record.name == f"{record.role}-a1b2c3" and record.address.startswith("127.0.0.1:")
    assert (await replica.record_autoscaling_stats())["in_flight"] == 0.0
    await replica.__del__()
    assert await registry.list() == []
    assert set(psutil.Process().children()) == before
    await registry.close()


async def test_a_replica_with_a_wrong_configuration_names_the_field(deployment: Any, redis_url: str) -> None:
    replica = object.__new__(deployment)
    with pytest.raises(ConfigurationError, match="colour"):
        await replica.__init__(config(redis_url) | {"colour": "red"})


async def test_a_node_whose_host_was_left_open_serves_where_ray_finds_its_machine(
    deployment: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.3")
    replica = object.__new__(deployment)
    await replica.__init__(config(redis_url, host=None))
    assert replica._node.shell.address.startswith("127.0.0.3:")
    await replica.__del__()


async def test_sigterm_drains_the_node_and_then_ends_its_process(
    deployment: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exited = asyncio.Event()
    heard: list[Callable[[], None]] = []
    monkeypatch.setattr("os._exit", lambda code: exited.set() if code == 0 else None)
    monkeypatch.setitem(deployment.__init__.__globals__, "hear_sigterm", lambda loop, hear: heard.append(hear))
    before = set(psutil.Process().children())
    replica = object.__new__(deployment)
    await replica.__init__(config(redis_url))
    await replica.check_health()
    heard[0]()
    async with asyncio.timeout(60.0):
        await exited.wait()
    registry = RedisRegistry(redis_url, "t:")
    assert await registry.list() == []
    await registry.close()
    assert set(psutil.Process().children()) == before, "its engine has ended"
    await replica.__del__()
