"""The proxy does to connections what its name says: what a test of a fault relies on."""

import asyncio
import gc
import socket
import warnings
from collections.abc import AsyncIterator

import pytest

from cluster.chaos.cut_proxy import DOWN, UP, CutProxy, cut_proxy

Pair = tuple[CutProxy, asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def echoed() -> AsyncIterator[Pair]:
    """A connection through a proxy to a server that says back what it hears."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with cut_proxy(f"127.0.0.1:{port}") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        yield proxy, reader, writer
        writer.close()
    server.close()


async def until(proxy: CutProxy, way: str, dropped_bytes: int) -> None:
    async with asyncio.timeout(60.0):
        while proxy.ways[way].dropped_bytes < dropped_bytes:  # noqa: ASYNC110  (nobody announces it)
            await asyncio.sleep(0.001)


async def test_what_is_held_arrives_late_and_whole(echoed: Pair) -> None:
    proxy, reader, writer = echoed
    proxy.hold(DOWN)
    writer.write(b"late")
    answer = asyncio.ensure_future(reader.readexactly(4))
    done, _ = await asyncio.wait([answer], timeout=0.05)
    assert not done
    proxy.heal()
    assert await answer == b"late"


@pytest.mark.parametrize("way", [UP, DOWN])
async def test_what_is_dropped_is_gone_and_its_connection_is_reset_by_the_healing(echoed: Pair, way: str) -> None:
    proxy, reader, writer = echoed
    proxy.drop(way)
    writer.write(b"gone")
    await until(proxy, way, 4)
    assert proxy.connections == 1
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        await reader.read(1)


async def test_a_reset_is_an_rst(echoed: Pair) -> None:
    proxy, reader, _ = echoed
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await reader.read(1)


async def test_one_byte_is_flipped_once(echoed: Pair) -> None:
    proxy, reader, writer = echoed
    proxy.corrupt(6, DOWN)
    for piece in (b"abcd", b"efgh"):
        writer.write(piece)
        await asyncio.sleep(0)
    writer.write(b"ijkl")
    assert await reader.readexactly(12) == b"abcdef" + bytes([ord("g") ^ 0xFF]) + b"hijkl"


async def test_something_is_done_between_two_bytes(echoed: Pair) -> None:
    proxy, reader, writer = echoed
    proxy.after(3, DOWN, lambda: proxy.hold(DOWN))
    writer.write(b"abcdef")
    assert await reader.readexactly(3) == b"abc"
    rest = asyncio.ensure_future(reader.readexactly(3))
    done, _ = await asyncio.wait([rest], timeout=0.05)
    assert not done
    proxy.heal()
    assert await rest == b"def"


async def test_nobody_behind_it_is_heard_at_once() -> None:
    async with cut_proxy("127.0.0.1:1") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        async with asyncio.timeout(60.0):
            with pytest.raises(ConnectionResetError):
                if await reader.read(1) == b"":
                    raise ConnectionResetError
        writer.close()


@pytest.mark.parametrize("passes", range(6))
def test_a_connection_that_comes_as_it_stops_is_closed_with_it(passes: int) -> None:
    """However far it was accepted, in passes of the loop, which closes when the proxy has stopped."""

    async def stopped_at_once() -> socket.socket:
        async with cut_proxy("127.0.0.1:1") as proxy:
            host, port = proxy.address.split(":")
            client = socket.create_connection((host, int(port)))
            for _ in range(passes):
                await asyncio.sleep(0)
        return client

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        client = asyncio.run(stopped_at_once())
        gc.collect()
    client.close()
    assert [str(each.message) for each in told] == []
