"""Real nodes, an orchestrator and their clients, whose registry and directory are real Redis servers behind a proxy."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from cluster.chaos.cut_proxy import CutProxy, cut_proxy
from kvcache.directory import KEY_BYTES
from kvcache.redis_directory import RedisDirectory
from kvcache.redis_registry import RedisRegistry
from orchestrator.node_client import GrpcConnector
from orchestrator.replica import Replica
from pronghorn.errors import Unavailable
from pronghorn.tasks import Owner
from tests.fakes.canary_engine import SEED
from tests.fakes.canary_pipeline import continuation
from tests.fakes.orchestrator_cluster import config
from tests.fakes.valkey_server import ValkeyServer
from tests.integration.nodes.rig import MODEL, PATIENCE_S, Node, Rig, at_rest, new_rig, orchestrator_identity, prompt
from tests.integration.orchestrator.test_real_nodes import NEW_TOKENS, answer, job, until_usable

PREFIX = "test"
CLIENTS = 6
PREFIXES = 24
"""Prompts that clients choose from: their blocks are more than a pool has, so that blocks come and go all the time."""
LEASE_S = 3.0
TROUBLED = ("directory_unavailable", "registry_unavailable")


class RedisSite:
    def __init__(
        self,
        stack: AsyncExitStack,
        users: AsyncExitStack,
        rig: Rig,
        server: ValkeyServer,
        proxy: CutProxy,
        folder: Path,
    ) -> None:
        """`stack` ends after the rig, `users` before it."""
        self.rig, self.server, self.proxy = rig, server, proxy
        self.nodes: list[Node] = []
        self.replica: Replica
        self.answers = 0
        self._stack, self._users, self._folder = stack, users, folder
        self._clients = Owner("clients")
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self.rig.lease_s = LEASE_S
        self.rig.registry = registry = self.registry()
        await registry.cluster_seed()
        for name in ("prefill-0", "decode-0", "decode-1"):
            make = self.rig.prefill if name == "prefill-0" else self.rig.decode
            self.rig.directory = RedisDirectory(self.url, PREFIX, 1 << 20)
            node, _ = await make(name)
            self.nodes.append(node)
            await node.shell.check_health()
        self.replica = Replica(
            config(model_name=MODEL, max_length=256, relist_period_s=0.2),
            self.registry(),
            GrpcConnector(orchestrator_identity(), connect_timeout_s=10.0, send_queue_frames=1024),
            self.rig.clock,
            seed=SEED,
        )
        self._users.push_async_callback(self.replica.stop)
        self.replica.start()
        await until_usable(self.replica, len(self.nodes))
        for number in range(CLIENTS):
            self._clients.start(self._ask_on(number), f"client-{number}")
        self._users.push_async_callback(self._clients.stop, 1.0)
        await self.more_answers()

    @property
    def url(self) -> str:
        """Through the proxy, as every process of the cluster has it."""
        return f"redis://{self.proxy.address}/0"

    def registry(self, **changes: Any) -> RedisRegistry:
        made = RedisRegistry(self.url, PREFIX, seed=SEED, **changes)
        self._stack.push_async_callback(made.close)
        return made

    def another_server(self) -> ValkeyServer:
        """Not started."""
        folder = self._folder / "2"
        folder.mkdir()
        made = ValkeyServer(folder, with_port=True)
        self._stack.callback(made.stop)
        return made

    # --- clients ---

    async def _ask_on(self, number: int) -> None:
        turn = number
        while not self._ended.is_set():
            tokens = prompt(4, start=3 * (turn % PREFIXES))
            assert await answer(self.replica, job(self.rig, tokens)) == continuation(tokens, NEW_TOKENS)
            self.answers += 1
            turn += 7

    async def more_answers(self, count: int = 3 * CLIENTS) -> None:
        """Until so many more requests have been answered; every one of them as without a fault."""
        wanted = self.answers + count
        await self.until(lambda: self.answers >= wanted)

    async def end_load(self) -> None:
        self._ended.set()
        await self.until(lambda: not self._clients.running)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                assert self._clients.failure is None, self._clients.failure
                await asyncio.sleep(0.01)

    def troubles(self) -> int:
        """How often anybody has counted that Redis did not do what it was asked."""
        counters = [node.counters.snapshot() for node in self.nodes] + [self.replica.counters()]
        return sum(counted.get(name, 0) for counted in counters for name in TROUBLED)

    async def troubled(self) -> None:
        """Until the fault was felt from now on: that is its proof."""
        before = self.troubles()
        await self.until(lambda: self.troubles() > before)

    # --- what must hold afterwards ---

    async def heals(self, server: ValkeyServer | None = None) -> None:
        """The load ends; then everybody is at rest and registered once, and the directory is the nodes' truth."""
        await self.more_answers()
        await self.end_load()
        await at_rest(*self.nodes)
        async with Redis.from_url(f"redis://{(server or self.server).address}/0") as redis, asyncio.timeout(PATIENCE_S):
            while (wrong := await self._wrong(redis)) is not None:
                last = wrong
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    raise AssertionError(f"not healed: {last}") from None
        await until_usable(self.replica, len(self.nodes))
        self.replica.holdings.check()
        assert self.replica.failure() is None
        assert [node.shell.unhealthy_reason() for node in self.nodes] == [None] * len(self.nodes)

    async def _wrong(self, redis: Redis) -> str | None:
        if (seed := await redis.get(f"{PREFIX}:seed")) != SEED:
            return f"the seed is {seed!r}"
        registry, directory = self.registry(), RedisDirectory(self.url, PREFIX, 1 << 20)
        try:
            listed = {row.incarnation for row in await registry.list()}
            said = {incarnation: keys async for incarnation, keys in _collected(directory)}
        except Unavailable as error:
            return error.message
        finally:
            await directory.close()
            await registry.close()
        if listed != {node.shell.incarnation for node in self.nodes}:
            return f"registered are {listed}"
        for node in self.nodes:
            truth = {h[:KEY_BYTES] for run in node.shell.contents.runs(256) for h in run.hashes}
            if said.get(node.shell.incarnation, set()) != truth:
                return f"{node.shell.name}: {len(said.get(node.shell.incarnation, ()))} rows for {len(truth)} blocks"
        return await self._doubled(redis)

    async def _doubled(self, redis: Redis) -> str | None:
        """Rows that name a life twice, one that counts no more, or that nobody would ever clear."""
        lives = {int(number) for number in await redis.hkeys(f"{PREFIX}:dir:lives")}
        pairs = 0
        async for key in redis.scan_iter(f"{PREFIX}:dir:row:*", count=1000):
            row = await redis.get(key)
            numbers = [int.from_bytes(row[i : i + 4], "little") for i in range(0, len(row), 4)]
            pairs += len(numbers)
            if len(numbers) != len(set(numbers)) or not set(numbers) <= lives:
                return f"{key!r} is {numbers}, of {lives}"
        if len(lives) != len(self.nodes) or int(await redis.get(f"{PREFIX}:dir:entries") or 0) != pairs:
            return f"{lives} live; {pairs} pairs, counted as {await redis.get(f'{PREFIX}:dir:entries')!r}"
        return None


async def _collected(directory: RedisDirectory) -> AsyncIterator[tuple[str, set[bytes]]]:
    found: dict[str, set[bytes]] = {}
    async for incarnation, keys in directory.rows():
        found.setdefault(incarnation, set()).update(keys)
    for item in found.items():
        yield item


@asynccontextmanager
async def redis_site() -> AsyncIterator[RedisSite]:
    """With clients that ask on until `heals`."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vk")))
        server = ValkeyServer(folder, with_port=True)
        stack.callback(lambda: server.stop())
        server.start()
        proxy = await stack.enter_async_context(cut_proxy(server.address))
        async with new_rig() as rig, AsyncExitStack() as users:
            site = RedisSite(stack, users, rig, server, proxy, folder)
            await site.start()
            yield site
