"""A node in a process of its own, without Ray: something that a test can kill, stop and continue.

`node_process` starts one and waits until it serves; `python -m tests.fakes.node_process` is the process. It ends when
its stdin does, so that nothing outlives the test.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from decode_nodes.config import DecodeNodeConfig
from decode_nodes.node import DecodeNode
from kvcache.memory import BlockMemory
from kvcache.memory_registry import MemoryRegistry
from kvcache.registry import NodeRecord
from pipelines.node.config import NodeConfig
from pipelines.node.peer_streams import streams_from_nodes
from pipelines.node.stream_client import IDLE_CHANNEL_S
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.process import ProcessEngine
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.node import PrefillNode
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.ids import NodeName
from pronghorn.wire import FETCH_METHOD, PREFILL_METHOD
from tests.fakes.canary_engine import SEED, canary_config, canary_memory

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
"""A real model on a busy machine may take that long."""
STOP_S = 10.0


class Told(msgspec.Struct, frozen=True):
    """What the process is started with."""

    role: Literal["prefill", "decode"]
    name: NodeName
    node: NodeConfig
    stall_timeout_s: float


@dataclass(frozen=True)
class NodeProcess:
    record: NodeRecord
    """As it would register itself; the test registers it, perhaps at another address."""
    process: asyncio.subprocess.Process

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Nothing, where it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # of a dead one, too: asyncio complains of a pipe that outlives its loop
        if self.process.returncode is None:
            self.resume()
            try:
                async with asyncio.timeout(STOP_S):
                    await self.process.wait()
            except TimeoutError:
                self.kill()
        await self.process.wait()


@asynccontextmanager
async def node_process(
    role: Literal["prefill", "decode"],
    name: str,
    *,
    stall_timeout_s: float = 30.0,
    shared_memory: bool = False,
    **engine: Any,
) -> AsyncIterator[NodeProcess]:
    """`engine` as in `canary_config`; a `model_path` that is a folder has the real engine serve it."""
    node = NodeConfig(
        engine=canary_config(**engine), redis_url="", key_prefix="", stop_grace_s=1.0, shared_memory=shared_memory
    )
    told = msgspec.json.encode(Told(role, NodeName(name), node, stall_timeout_s)).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "tests.fakes.node_process", told),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            said = await process.stdout.readline()
        assert said, f"{name} did not start"
        running = NodeProcess(msgspec.json.decode(said, type=NodeRecord), process)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    try:
        yield running
    finally:
        await running.end()


# --- in the process --------------------------------------------------------------------------------------------------


def _engine(told: Told) -> ProcessEngine:
    config = told.node.engine
    if config.model_path.startswith("canary:"):
        return ProcessEngine(f"tests.fakes.canary_{told.role}", config, SEED, canary_memory(config))
    memory = BlockMemory.create(config.total_blocks, layout_of(config).block_bytes)
    return ProcessEngine(f"{told.role}_nodes.engine", config, SEED, memory)


async def _serve(told: Told) -> None:
    clock = SystemClock()
    registry = MemoryRegistry(clock)
    counters = Counters()
    fetch = streams_from_nodes(FETCH_METHOD, told.node, clock, IDLE_CHANNEL_S, counters)
    node: PrefillNode | DecodeNode
    if told.role == "prefill":
        config = PrefillNodeConfig(node=told.node)
        node = PrefillNode(
            name=told.name,
            config=config,
            hash_seed=SEED,
            engine=_engine(told),
            registry=registry,
            fetch=fetch,
            clock=clock,
            counters=counters,
        )
    else:
        decode = DecodeNodeConfig(node=told.node, stall_timeout_s=told.stall_timeout_s)
        node = DecodeNode(
            name=told.name,
            config=decode,
            hash_seed=SEED,
            engine=_engine(told),
            registry=registry,
            fetch=fetch,
            prefill=streams_from_nodes(PREFILL_METHOD, told.node, clock, decode.idle_channel_s, counters),
            counters=counters,
            clock=clock,
        )
    await node.start()
    try:
        sys.stdout.write(msgspec.json.encode(node.shell.record()).decode() + "\n")
        sys.stdout.flush()
        await _end_of(sys.stdin)
    finally:
        await node.shell.stop()


async def _end_of(stdin: Any) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdin)
    await reader.read()


if __name__ == "__main__":
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=Told)))
