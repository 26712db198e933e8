"""The links of a real cluster's nodes for tests that have no event loop: they live in a thread.

The cluster is started with `--advertise-host=127.0.0.9`.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.chaos.cut_proxy import CutProxy
from cluster.chaos.links import Links
from kvcache.registry import NodeRecord
from tests.fakes.running_cluster import CommandLine

ACT_S = 10.0


class ProxiedNodes:
    def __init__(self, pronghorn: CommandLine, name: str) -> None:
        self._links = Links(pronghorn.folder(name))
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(ACT_S)
        assert not self._thread.is_alive()

    def records(self) -> dict[str, NodeRecord]:
        """By name: the nodes that are registered now."""
        return dict(self._links.records)

    def act(self, node: NodeRecord, what: Callable[[CutProxy], None]) -> None:
        """Have `what` done to the proxy of that node's streams; returns when it is done. A proxy may call it too."""
        if threading.current_thread() is self._thread:
            what(self._links.before(node.address))
            return
        done = threading.Event()

        def do() -> None:
            what(self._links.before(node.address))
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
        self._links.start()
        try:
            await self._ended.wait()
        finally:
            await self._links.stop()


@contextmanager
def proxied_nodes(pronghorn: CommandLine, name: str) -> Iterator[ProxiedNodes]:
    """To be entered before the cluster of that name is started, and left after it has ended."""
    nodes = ProxiedNodes(pronghorn, name)
    nodes.start()
    try:
        yield nodes
    finally:
        nodes.stop()
