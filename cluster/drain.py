"""Asking one node to leave, and staying until it has gone: what `pronghorn drain` does.

The node is found in the registry, by its name or its address, and asked over its own gRPC server; what it still holds
is asked of it too. Who starts another in its place is Serve's concern, and `scaling.py`'s where nobody should.
"""

import asyncio
import time
from typing import TypeAlias

import grpc
from grpc import aio

from cluster.announce import Announce, detail, stage
from kvcache.redis_registry import RedisRegistry
from kvcache.registry import NodeRecord
from pipelines.types import wire
from pipelines.types.frames import NodeReport
from pronghorn.credentials import Credentials, TlsFiles
from pronghorn.errors import ConfigurationError, Unavailable
from pronghorn.wire import DRAIN_METHOD, STATUS_METHOD
from protos.node_pb2 import DrainRequest

Method: TypeAlias = "aio.UnaryUnaryMultiCallable[bytes, bytes]"  # generic in its stubs only

POLL_S = 0.2
ANSWER_TIMEOUT_S = 5.0
STOP_MARGIN_S = 30.0
"""What a node may take beyond its grace to end its sessions, its engine and itself."""


def choose(rows: list[NodeRecord], wanted: str) -> NodeRecord:
    """The node of that name or address; a beginning of either is enough where it fits one alone.

    Raises ConfigurationError that lists the nodes there are.
    """
    exact = [row for row in rows if wanted in (row.name, row.address)]
    fitting = exact or [
        row for row in rows if wanted and (row.name.startswith(wanted) or row.address.startswith(wanted))
    ]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{row.name} ({row.address})" for row in rows) or "none"
    what = f"{len(fitting)} nodes begin with" if fitting else "no node is called"
    raise ConfigurationError(f"{what} {wanted!r}; the nodes are: {known}", param="node")


async def find(redis_url: str, key_prefix: str, wanted: str, *, alone: bool) -> NodeRecord:
    """`alone`: whether it may be the only one of its pool. Raises ConfigurationError."""
    registry = RedisRegistry(redis_url, key_prefix)
    try:
        rows = await registry.list()
        node = choose(rows, wanted)
        if not alone and sum((row.role, row.model) == (node.role, node.model) for row in rows) == 1:
            raise ConfigurationError(
                f"{node.name} is the last {node.role} node of {node.model}; it can only be replaced", param="node"
            )
        return node
    except Unavailable as error:
        raise ConfigurationError(f"the node registry does not answer: {error.message}") from None
    finally:
        await registry.close()


async def drain(
    node: NodeRecord | NodeReport,
    grace_s: float | None,
    limit_s: float,
    announce: Announce,
    tls: TlsFiles | None = None,
) -> None:
    """Returns once the node's server is gone. Raises ConfigurationError where it refuses, or is there still after
    `limit_s`, or never was."""
    give_up_s = time.monotonic() + limit_s
    async with Credentials(tls).channel(node.address) as channel:
        begin: Method = channel.unary_unary(DRAIN_METHOD)
        status: Method = channel.unary_unary(STATUS_METHOD)
        request = DrainRequest(incarnation=node.incarnation, grace_s=grace_s)
        try:
            answer = await begin(request.SerializeToString(), timeout=ANSWER_TIMEOUT_S)
        except aio.AioRpcError as error:
            said = f"{error.code().name}: {error.details()}"
            raise ConfigurationError(f"{node.name} at {node.address} was not drained: {said}") from None
        announce(stage(f"draining {node.name}"))
        while True:
            report: NodeReport = wire.decode(answer, NodeReport)
            announce(detail(f"{report.in_flight} in flight, {report.held_blocks} blocks held"))
            if time.monotonic() > give_up_s:
                raise ConfigurationError(
                    f"{node.name} is there still after {limit_s:.0f} s, with {report.in_flight} in flight"
                )
            await asyncio.sleep(POLL_S)
            try:
                answer = await status(b"", timeout=ANSWER_TIMEOUT_S)
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # it may be busy ending its engine
                    return
