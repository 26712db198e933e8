"""How many connections a node opens to another, and which of them a stream takes."""

import asyncio
from contextlib import AsyncExitStack

from pipelines.node.session_service import grpc_server
from pipelines.node.stream_client import StreamClient
from pipelines.node.stream_service import stream_handler
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import SystemClock
from pronghorn.ids import NodeName, new_incarnation
from pronghorn.wire import FETCH_METHOD
from tests.integration.nodes.test_streams import Sender


async def test_streams_are_shared_out_among_a_few_connections_and_reuse_them() -> None:
    async with asyncio.timeout(60.0), AsyncExitStack() as stack:
        server = grpc_server()
        server.add_generic_rpc_handlers([stream_handler(FETCH_METHOD, Sender().frames)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        client = StreamClient(FETCH_METHOD, SystemClock(), 0.0, connections=2)
        stack.push_async_callback(client.close)
        target = PrefillTarget(NodeName("holder"), f"127.0.0.1:{port}", new_incarnation())
        async with client.stream(target, b"", 5.0):
            assert client.open_channels == 1
            async with client.stream(target, b"", 5.0), client.stream(target, b"", 5.0):
                assert client.open_channels == 2
        async with client.stream(target, b"", 5.0):
            assert client.open_channels == 2
        await client.close_idle()
        assert client.open_channels == 0
