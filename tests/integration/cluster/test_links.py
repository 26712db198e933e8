import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.chaos import links
from cluster.run_folder import RunFolder
from kvcache.registry import NodeRecord
from pronghorn.errors import Unavailable
from pronghorn.ids import Incarnation, NodeName

PATIENCE_S = 30.0


class Listed:
    """A registry that says what the test says."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] | None = []

    async def list(self) -> list[NodeRecord]:
        if self.records is None:
            raise Unavailable("Redis is away")
        return self.records

    async def close(self) -> None: ...


def record(address: str) -> NodeRecord:
    return NodeRecord(
        name=NodeName("decode-1"), role="decode", model="m", address=address, incarnation=Incarnation("a"), layout={},
        seed_digest="", load={}, host="h", pid=1, registered_at_unix_s=0.0,
    )  # fmt: skip


async def until_there(standing: links.Links, address: str, there: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                standing.before(address)
                found = True
            except Unavailable:
                found = False
            if found is there:
                return
            await asyncio.sleep(0.01)


async def test_a_proxy_goes_when_its_node_has_gone_and_stays_while_anybody_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "ADVERTISED", "127.0.0.10")
    registry = Listed()
    monkeypatch.setattr(links.Links, "_registry", lambda _: registry)
    connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    node = await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), "127.0.0.1", 0)
    address = f"127.0.0.10:{node.sockets[0].getsockname()[1]}"
    standing = links.Links(RunFolder(tmp_path, "x"), idle_s=0.05)
    standing.start()
    try:
        registry.records = [record(address)]
        await until_there(standing, address, True)
        _, client = await asyncio.open_connection("127.0.0.10", int(address.rpartition(":")[2]))
        far = await asyncio.wait_for(connected.get(), PATIENCE_S)
        registry.records = []
        await asyncio.sleep(0.3)
        assert standing.before(address).connections == 1, "a node that leaves has streams still"
        registry.records = None
        for writer in (client, far):
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.sleep(0.3)
        standing.before(address)  # nobody says that it has gone
        registry.records = []
        await until_there(standing, address, False)
        registry.records = [record(address)]
        await until_there(standing, address, True)
    finally:
        await standing.stop()
        node.close()
