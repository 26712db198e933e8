"""Every node of a real cluster behind a proxy of its own, in which a test cuts what it likes.

The cluster is started with `--advertise-host=127.0.0.9`: its nodes listen on 127.0.0.1 and are dialled on 127.0.0.9,
where the proxies stand, on the ports of its node. They run in a thread and follow the registry.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cluster.chaos.cut_proxy import CutProxy
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord
from pronghorn.errors import Unavailable
from tests.fakes.running_cluster import CommandLine

ADVERTISED = "127.0.0.9"
LISTENING = "127.0.0.1"
PERIOD_S = 0.05
ACT_S = 10.0


class ProxiedNodes:
    def __init__(self, pronghorn: CommandLine, name: str) -> None:
        self._pronghorn = pronghorn
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._proxies: dict[str, CutProxy] = {}
        self._records: dict[str, NodeRecord] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(ACT_S)
        assert not self._thread.is_alive()

    def records(self) -> dict[str, NodeRecord]:
        """By name: the nodes that are registered now."""
        return dict(self._records)

    def act(self, node: NodeRecord, what: Callable[[CutProxy], None]) -> None:
        """Have `what` done to the proxy of that node's streams; returns when it is done. A proxy may call it too."""
        if threading.current_thread() is self._thread:
            what(self._proxies[node.address])
            return
        done = threading.Event()

        def do() -> None:
            what(self._proxies[node.address])
            done.set()

        self._loop.call_soon_threadsafe(do)
        assert done.wait(ACT_S), f"nothing could be done to the proxy of {node.name}"

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow())
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        registry: RedisRegistry | None = None
        try:
            while not self._ended.is_set():
                registry = registry or self._registry()
                if registry is not None:
                    with suppress(Unavailable):
                        await self._stand_before(await registry.list())
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._ended.wait()
        finally:
            if registry is not None:
                await registry.close()
            for proxy in self._proxies.values():
                await proxy.stop()

    def _registry(self) -> RedisRegistry | None:
        folder = self._pronghorn.folder(self._name)
        state, run = folder.state(), folder.run()
        if state is None or run is None or state.redis_url is None:
            return None
        return RedisRegistry(state.redis_url, run.config.service.key_prefix)

    async def _stand_before(self, records: list[NodeRecord]) -> None:
        for record in records:
            for address in (record.address, record.operations_address):
                if address is not None and address not in self._proxies:
                    port = int(address.rpartition(":")[2])
                    proxy = self._proxies[address] = CutProxy(LISTENING, port)
                    await proxy.start(ADVERTISED, port)
        self._records = {record.name: record for record in records}


@contextmanager
def proxied_nodes(pronghorn: CommandLine, name: str) -> Iterator[ProxiedNodes]:
    """To be entered before the cluster of that name is started, and left after it has ended."""
    nodes = ProxiedNodes(pronghorn, name)
    nodes.start()
    try:
        yield nodes
    finally:
        nodes.stop()
