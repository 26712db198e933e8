"""Every node of a cluster on this machine behind a proxy of its own, in which its link is cut.

The cluster is started with `--advertise-host=127.0.0.9`: its nodes listen on 127.0.0.1 and are dialled on 127.0.0.9,
where the proxies stand, each on its node's own port; what is asked of their operations ports passes there too, and is
never harmed. They follow the registry from before the first node comes, and live in the event loop that starts them.
"""

import asyncio
from contextlib import suppress

from cluster.chaos.cut_proxy import CutProxy
from cluster.run_folder import RunFolder
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord
from pronghorn.errors import Unavailable
from pronghorn.tasks import Owner

ADVERTISED = "127.0.0.9"
LISTENING = "127.0.0.1"
PERIOD_S = 0.05
STOP_GRACE_S = 30.0
IDLE_S = 60.0
"""After which nobody stands any more where nobody is registered and nobody is connected."""


class Links:
    """Between `start` and `stop`; the cluster is started after and ended before."""

    def __init__(self, folder: RunFolder, idle_s: float = IDLE_S) -> None:
        self._folder = folder
        self._idle_s = idle_s
        self._idle_since_s: dict[str, float] = {}
        self._owner = Owner("links")
        self._proxies: dict[str, CutProxy] = {}
        self.records: dict[str, NodeRecord] = {}
        """By name: the nodes that are registered now."""

    def start(self) -> None:
        self._owner.start(self._follow(), "follow the registry")

    async def stop(self) -> None:
        await self._owner.stop(STOP_GRACE_S)
        for proxy in self._proxies.values():
            await proxy.stop()

    def before(self, address: str) -> CutProxy:
        """The proxy before the node at `address`. Raises Unavailable where there is none."""
        if address not in self._proxies:
            raise Unavailable(f"there is no proxy before {address}")
        return self._proxies[address]

    async def _follow(self) -> None:
        registry: RedisRegistry | None = None
        try:
            while True:
                registry = registry or self._registry()
                if registry is not None:
                    with suppress(Unavailable):
                        await self._stand_before(await registry.list())
                await asyncio.sleep(PERIOD_S)
        finally:
            if registry is not None:
                await registry.close()

    def _registry(self) -> RedisRegistry | None:
        state, run = self._folder.state(), self._folder.run()
        if state is None or run is None or state.redis_url is None:
            return None
        return RedisRegistry(state.redis_url, run.config.service.key_prefix)

    async def _stand_before(self, records: list[NodeRecord]) -> None:
        wanted = {address for record in records for address in (record.address, record.operations_address) if address}
        for address in sorted(wanted - self._proxies.keys()):
            port = int(address.rpartition(":")[2])
            proxy = self._proxies[address] = CutProxy(LISTENING, port)
            await proxy.start(ADVERTISED, port)
        await self._leave(wanted)
        self.records = {record.name: record for record in records}

    async def _leave(self, wanted: set[str]) -> None:
        """Where a node has gone: Redis may have forgotten one that lives, and one that leaves still has streams."""
        now_s = asyncio.get_running_loop().time()
        for address, proxy in list(self._proxies.items()):
            if address in wanted or proxy.connections:
                self._idle_since_s.pop(address, None)
            elif now_s - self._idle_since_s.setdefault(address, now_s) > self._idle_s:
                del self._proxies[address], self._idle_since_s[address]
                await proxy.stop()
