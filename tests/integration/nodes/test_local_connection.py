"""Connections between processes of one host, over real sockets."""

import asyncio
import socket

import pytest

from pipelines.node.local_connection import LocalConnection
from pronghorn.errors import NodeLost

MUCH = bytes(8 << 20)
"""More than a socket takes that nobody reads."""


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


async def test_a_message_that_waits_for_room_ends_with_the_connection() -> None:
    ours, theirs = pair()
    connection = LocalConnection(ours, lambda: None)
    sending = asyncio.create_task(connection.send(MUCH))
    await asyncio.sleep(0)  # as much as fits has left
    theirs.close()
    async with asyncio.timeout(60.0):
        with pytest.raises(NodeLost):
            await sending


async def test_a_message_to_one_who_has_just_gone_says_so() -> None:
    ours, theirs = pair()
    ended = asyncio.Event()
    connection = LocalConnection(ours, ended.set)
    theirs.close()  # and nothing has been read since
    with pytest.raises(NodeLost, match="broke"):
        await connection.send(b"a word")
    assert ended.is_set()


async def test_a_connection_that_gets_the_number_of_one_that_ended_while_it_sent_is_read() -> None:
    ours, theirs = pair()
    number = ours.fileno()
    ended = asyncio.Event()
    connection = LocalConnection(ours, ended.set)
    sending = asyncio.create_task(connection.send(MUCH))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.close()
    next_ours, next_theirs = pair()
    assert number in (next_ours.fileno(), next_theirs.fileno()), "the system gives out the lowest free number"
    if next_ours.fileno() != number:
        next_ours, next_theirs = next_theirs, next_ours
        next_ours.setblocking(False)
    after = LocalConnection(next_ours, lambda: None)
    peer = LocalConnection(next_theirs, lambda: None)
    next_theirs.setblocking(False)
    await peer.send(b"a word")
    async with asyncio.timeout(60.0):
        assert await after.receive() == b"a word"
    with pytest.raises(NodeLost):
        await sending
    for one in (after, peer):
        one.close()
    theirs.close()
