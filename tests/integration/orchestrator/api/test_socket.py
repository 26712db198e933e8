"""What a real connection does to a request: it closes, it sends too much, it sends in chunks."""

import asyncio
import json
import time

import pytest

from tests.fakes.api_client import MODEL, Served
from tests.fakes.http_server import served_on_loopback
from tests.fakes.scripted_generator import Stall, Tokens

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CANCELLED_WITHIN_S = 1.0  # milliseconds in truth; the machine may be busy


def post(body: bytes, headers: str = "") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.conformance(70)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_socket_cancels_the_work_at_once(stream: bool) -> None:
    served = Served([Tokens(b"h"), Stall()] if stream else [Stall()])
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(json.dumps(BODY | {"stream": stream}).encode()))
        await asyncio.wait_for(served.generator.entered.wait(), 60)
        if stream:
            await asyncio.wait_for(reader.readuntil(b'"content":"h"'), 60)
        closed_at_s = time.monotonic()
        writer.close()
        await asyncio.wait_for(served.generator.runs[0].closed.wait(), 60)
        assert time.monotonic() - closed_at_s < CANCELLED_WITHIN_S
        await writer.wait_closed()


async def test_a_reset_socket_cancels_the_work() -> None:
    served = Served([Tokens(b"h"), Stall()])
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(json.dumps(BODY | {"stream": True}).encode()))
        await asyncio.wait_for(reader.readuntil(b'"content":"h"'), 60)
        writer.transport.abort()
        await asyncio.wait_for(served.generator.runs[0].closed.wait(), 60)


@pytest.mark.conformance(61)
async def test_a_chunked_body_without_end_is_refused_before_it_ends() -> None:
    served = Served(max_request_bytes=1000)
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write((b"200\r\n" + b" " * 0x200 + b"\r\n") * 2)  # and no last chunk
        status = await asyncio.wait_for(reader.readline(), 60)
        assert status.split()[1] == b"413"
        writer.close()
        await writer.wait_closed()


async def test_an_announced_size_is_refused_before_the_body_comes() -> None:
    served = Served(max_request_bytes=1000)
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 100000000\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert b" 413 " in answer.splitlines()[0]
        assert b"connection: close" in answer.lower()
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_does_not_come_is_a_504() -> None:
    served = Served(default_deadline_s=0.05)
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n{")
        assert b" 504 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        await writer.wait_closed()


async def test_a_connection_serves_one_request_after_another() -> None:
    served = Served()
    async with served_on_loopback(served.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for stream in (True, False, True):
            writer.write(post(json.dumps(BODY | {"stream": stream}).encode()))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert b" 200 " in head.splitlines()[0]
            if stream:
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
                assert answer.count(b"[DONE]") == 1
            else:
                (length,) = [
                    int(x.split(b":")[1]) for x in head.splitlines() if x.lower().startswith(b"content-length")
                ]
                await asyncio.wait_for(reader.readexactly(length), 60)
        writer.close()
        await writer.wait_closed()
