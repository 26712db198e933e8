"""How a stream behaves between its server and its client, one ASGI message at a time."""

import asyncio
import json

import pytest

from orchestrator.api.choice import Piece
from orchestrator.api.chunks import ChatChunks, CompletionChunks
from pronghorn.errors import NodeLost
from tests.fakes.api_client import MODEL, Connection, Served
from tests.fakes.scripted_generator import Fail, Stall, Tokens, spoken

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.field("vllm-ascend#13165")
@pytest.mark.conformance(62)
async def test_no_header_leaves_before_the_first_output() -> None:
    stall = Stall()
    served = Served([stall, *spoken("h")])
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    await asyncio.wait_for(served.generator.entered.wait(), 60)
    assert connection.sent.empty()
    stall.until.set()
    assert (await connection.next())["status"] == 200
    await asyncio.wait_for(connection.call, 60)


@pytest.mark.conformance(70)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_output_cancels_the_work(stream: bool) -> None:
    served = Served([Stall()])
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": stream})
    await asyncio.wait_for(served.generator.entered.wait(), 60)
    connection.disconnect()
    await asyncio.wait_for(served.generator.runs[0].closed.wait(), 60)
    await asyncio.wait_for(connection.call, 60)
    assert (await connection.next())["status"] == 499


@pytest.mark.conformance(70)
async def test_a_client_that_leaves_a_stream_cancels_the_work_and_hears_nothing_more() -> None:
    served = Served([Tokens(b"h"), Stall()])
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    assert (await connection.next())["type"] == "http.response.start"
    assert b'"h"' in (await connection.next())["body"]
    connection.disconnect()
    await asyncio.wait_for(served.generator.runs[0].closed.wait(), 60)
    await asyncio.wait_for(connection.call, 60)
    assert connection.sent.empty()


async def test_a_client_that_leaves_cancels_every_prompt() -> None:
    served = Served([Tokens(b"h"), Stall()])
    connection = Connection(served.app, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    await connection.next()
    connection.disconnect()
    await asyncio.wait_for(connection.call, 60)
    assert len(served.generator.runs) == 3
    assert served.generator.all_closed


async def test_a_server_that_stops_cancels_the_work() -> None:
    served = Served([Tokens(b"h"), Stall()])
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    await connection.next()
    connection.call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.call
    assert served.generator.all_closed


@pytest.mark.field("tinfoilsh#469")
async def test_a_silent_stream_carries_comments() -> None:
    stall = Stall()
    served = Served([Tokens(b"h"), stall, *spoken("i")], heartbeat_s=0.01)
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    await connection.next()
    await connection.next()
    for _ in range(2):
        assert (await connection.next())["body"] == b": ping\n\n"
    stall.until.set()
    await asyncio.wait_for(connection.call, 60)
    bodies = [connection.sent.get_nowait() for _ in range(connection.sent.qsize())]
    assert bodies[-1] == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


async def test_a_client_that_does_not_read_cannot_hold_a_request_beyond_its_end() -> None:
    served = Served([Tokens(b"h"), Stall()], last_word_s=0.01)
    blocked = asyncio.Event()

    class Deaf(Connection):
        async def _send(self, message) -> None:
            if message["type"] == "http.response.body":
                await blocked.wait()

    connection = Deaf(served.app, "/v1/chat/completions", CHAT | {"stream": True, "timeout": 0.05})
    await asyncio.wait_for(connection.call, 60)
    assert served.generator.all_closed


async def test_a_connection_that_breaks_while_writing_cancels_the_work() -> None:
    served = Served([Tokens(b"h"), Tokens(b"i"), Stall()])

    class Broken(Connection):
        async def _send(self, message) -> None:
            if b'"i"' in message.get("body", b""):
                raise BrokenPipeError

    connection = Broken(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    await asyncio.wait_for(connection.call, 60)
    assert served.generator.all_closed


@pytest.mark.conformance(62)
@pytest.mark.parametrize("text", ['a"b\\c', "\u2028\x85\x0b\x1c", "\n\r\t", "😀€", "</script>"])
@pytest.mark.parametrize("chunks", [ChatChunks, CompletionChunks])
def test_every_event_is_one_line_of_ascii_json(chunks, text: str) -> None:
    event = chunks("id", 1, 'm"x', False).piece(Piece(0, text)).decode("ascii")
    for block in event.removesuffix("\n\n").split("\n\n"):
        assert len(block.splitlines()) == 1
        (choice,) = json.loads(block.removeprefix("data: "))["choices"]
    assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == text


@pytest.mark.field("vllm-ascend#13165", "gpustack#5939")
@pytest.mark.conformance(62)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_long_prefill_carries_comments_and_what_fails_then_is_an_event(fails: bool, caplog) -> None:
    stall = Stall()
    then = [Fail(NodeLost("decode-1 is gone"))] if fails else spoken("h")
    served = Served([stall, *then], heartbeat_s=0.01)
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    assert (await connection.next())["status"] == 200
    for _ in range(2):
        assert (await connection.next())["body"] == b": ping\n\n"
    stall.until.set()
    await asyncio.wait_for(connection.call, 60)
    last = [connection.sent.get_nowait() for _ in range(connection.sent.qsize())][-1]
    assert (b"decode-1 is gone" in last["body"]) == fails
    assert (last["body"] == b"data: [DONE]\n\n") != fails
    assert not last["more_body"]


@pytest.mark.field("vllm-ascend#13165")
async def test_what_fails_within_the_first_heartbeat_is_an_http_error() -> None:
    served = Served([Fail(NodeLost("decode-1 is gone"))], heartbeat_s=60.0)
    connection = Connection(served.app, "/v1/chat/completions", CHAT | {"stream": True})
    assert (await connection.next())["status"] == 503
    await asyncio.wait_for(connection.call, 60)
