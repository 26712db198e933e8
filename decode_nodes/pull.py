"""One hand-over as the decode node lives it: ask one prefill node, check all that it says, write what it sends.

Knows the order of the messages and the bound on silence. Must not know what is done about a failure, nor what
carries the frames. Invariants: the first message is the peer's hello, checked before anything is written; only wanted
positions are written, each once; nothing is written after `pull` has returned.
"""

import asyncio
from collections.abc import Callable
from typing import assert_never

from google.protobuf.message import DecodeError

from kvcache import transfer
from kvcache.handshake import Identity, check_peer
from pipelines.node.stream_port import FrameStream
from pipelines.types import wire
from pipelines.types.frames import PrefillTarget
from pipelines.types.handover import NOT_BEGUN, FirstToken, HandOverMessage, Progress, Refusal, Welcome
from pronghorn.errors import HandshakeRefused, NodeLost, TransferFailed, from_record
from protos import node_pb2


async def pull(
    stream: FrameStream,
    *,
    ours: Identity,
    target: PrefillTarget,
    receiver: transfer.BlockReceiver,
    on_first_token: Callable[[FirstToken], None],
    stall_timeout_s: float,
) -> None:
    """Receive one hand-over into the receiver's destinations; return once it has committed.

    Raises HandshakeRefused, TransferFailed, NodeLost, or the error that the prefill node gave.
    """
    await _welcome(stream, ours, target, stall_timeout_s)
    told = False
    while True:
        match await _next_frame(stream, target, stall_timeout_s):
            case transfer.BlocksFrame() as blocks:
                stream.take(blocks, receiver)
            case transfer.MessageFrame() as message:
                token = _first_token(message)
                if token is not None:
                    on_first_token(token)
                    told = True
            case transfer.CommitFrame() as commit:
                receiver.commit(commit)
                if not told:
                    raise TransferFailed(f"{target.name} committed without a first token", code="incomplete")
                return
            case never:
                assert_never(never)


async def _welcome(stream: FrameStream, ours: Identity, target: PrefillTarget, stall_timeout_s: float) -> None:
    try:
        frame = await _next_frame(stream, target, stall_timeout_s)
    except NodeLost as error:
        if error.code != NodeLost.default_code:
            raise
        raise NodeLost(error.message, code=NOT_BEGUN) from error
    said = _said(frame) if isinstance(frame, transfer.MessageFrame) else frame
    if isinstance(said, Refusal):
        raise from_record(said.error)
    if not isinstance(said, Welcome):
        raise HandshakeRefused(f"{target.name} began with a {type(said).__name__}, not with its hello")
    try:
        theirs = Identity.from_hello(node_pb2.Hello.FromString(said.hello))
    except DecodeError as error:
        raise HandshakeRefused(f"{target.name} sent a hello that cannot be read") from error
    check_peer(ours, theirs, expect_incarnation=target.incarnation)


def _first_token(frame: transfer.MessageFrame) -> FirstToken | None:
    match _said(frame):
        case FirstToken() as token:
            return token
        case Refusal(error=error):
            raise from_record(error)
        case Progress():
            return None
        case Welcome():
            raise TransferFailed("a second hello came in one hand-over", code="malformed")
        case never:
            assert_never(never)


def _said(frame: transfer.MessageFrame) -> HandOverMessage:
    message: HandOverMessage = wire.decode(frame.payload, HandOverMessage)
    return message


async def _next_frame(stream: FrameStream, target: PrefillTarget, stall_timeout_s: float) -> transfer.Frame:
    try:
        async with asyncio.timeout(stall_timeout_s):
            frame = await stream.read()
    except TimeoutError as error:
        message = f"{target.name} said nothing for {stall_timeout_s} s in a hand-over"
        raise NodeLost(message, code="stalled") from error
    if frame is None:
        raise TransferFailed(f"{target.name} ended a hand-over before its commit", code="incomplete")
    return frame
