"""How soon a node that is gone is seen to be gone: `python -m bench.detection [--quick] [--watch SECONDS]`.

Two decode nodes with the real model, each a process with its engine, behind proxies; an orchestrator's core in this
process. One node after another is killed, stopped or cut off, idle and with both cores saturated by the engines, while
streams run on it: the time until it gets no new work (unusable) and until its streams are known to be lost. Then both
nodes are watched under that load: how often a healthy one was flagged, and the longest silence between its heartbeats.
Prints a table and one line of JSON; judges nothing.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cluster import config
from cluster.chaos.cut_proxy import DOWN, CutProxy, cut_proxy
from cluster.model import find
from kvcache.handshake import Identity
from kvcache.hashing import seed_digest
from kvcache.memory_registry import MemoryRegistry
from orchestrator.config import OrchestratorConfig
from orchestrator.node_client import GrpcConnector
from orchestrator.ports import GenerationJob
from orchestrator.replica import Replica
from pipelines.types.frames import Heartbeat
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.clock import SystemClock
from pronghorn.deadline import Deadline
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID, new_incarnation
from tests.fakes.canary_engine import SEED
from tests.fakes.node_process import NodeProcess, node_process

MODEL = "bench"
VOCABULARY = 40_000
LIMIT_S = 30.0
POLL_S = 0.005
STREAMS = 8
"""Sequences at once on the two nodes, where they are loaded."""

Fault = Callable[[NodeProcess, CutProxy], None]
FAULTS: dict[str, Fault] = {
    "killed": lambda node, _: node.kill(),
    "stopped": lambda node, _: node.pause(),
    "link down": lambda _, proxy: proxy.hold(),
    "link down, one way": lambda _, proxy: proxy.hold(DOWN),
    "black hole": lambda _, proxy: proxy.drop(),
    "reset": lambda _, proxy: proxy.reset(),
}


class Watched:
    """An orchestrator's core and the nodes behind their proxies."""

    def __init__(self, model: Path) -> None:
        self.clock = SystemClock()
        self.registry = MemoryRegistry(self.clock, new_seed=lambda: SEED)
        identity = Identity(
            role="orchestrator", name="bench", incarnation=new_incarnation(), model=MODEL, seed_digest=seed_digest(SEED)
        )
        self.connector = GrpcConnector(identity, connect_timeout_s=5.0, send_queue_frames=64)
        self.replica = Replica(
            OrchestratorConfig("memory:", "bench", MODEL, str(model), max_length=2048),
            self.registry,
            self.connector,
            self.clock,
        )
        self._model = model

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[tuple[NodeProcess, CutProxy]]:
        engine: dict[str, Any] = {"model_path": str(self._model), "model_name": MODEL, "num_blocks": 256, "threads": 1}
        engine |= {"block_tokens": 16, "max_batch_input_tokens": 256, "max_length": 2048, "report_period_s": 0.25}
        async with (
            node_process("decode", name, **engine) as node,
            cut_proxy(node.record.address) as proxy,
        ):
            self.seen = msgspec.structs.replace(node.record, address=proxy.address)
            await self.registry.register(self.seen, 3600.0)
            await self.until(lambda: self.usable(name))
            yield node, proxy
            await self.registry.deregister(node.record.name, node.record.incarnation)
            proxy.heal()

    def usable(self, name: str) -> bool:
        return any(view.name == name and view.unusable is None for view in self.replica.views())

    async def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> float | None:
        """Seconds until it held; None where it did not within `limit_s`."""
        began_s = time.monotonic()
        while not what():
            if time.monotonic() - began_s > limit_s:
                return None
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s

    async def stream(self, name: str | None) -> None:
        """One after another, until cancelled; on the node `name`, or on any."""
        while True:
            prompt = np.array([random.randrange(1000, VOCABULARY) for _ in range(64)], dtype=np.int64)
            context = TextContext(
                request_id=RequestID(),
                max_length=len(prompt) + 1500,
                tokens=TokenBuffer(prompt),
                ignore_eos=True,
                sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            )
            job = GenerationJob(context, Deadline.after(self.clock.now_s(), 600.0), MODEL, name)
            try:
                async with self.replica.generate(job) as outputs:
                    async for _ in outputs:
                        pass
            except PronghornError:
                await asyncio.sleep(0.1)  # its node has gone; the next one goes to the other


@asynccontextmanager
async def load(watched: Watched, streams: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(watched.stream(None)) for _ in range(streams)]
    await asyncio.sleep(3.0 if tasks else 0.5)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def detect(watched: Watched, fault: Fault, name: str) -> dict[str, float | None]:
    async with watched.node(name) as (node, proxy):
        incarnation = node.record.incarnation
        await asyncio.sleep(1.0)
        fault(node, proxy)
        unusable, lost = await asyncio.gather(
            watched.until(lambda: not watched.usable(name)),
            watched.until(lambda: incarnation not in watched.replica.membership.open_to()),
        )
        return {"unusable_s": unusable, "lost_s": lost}


async def watch(watched: Watched, seconds: float) -> dict[str, Any]:
    """Both nodes under load for so long."""
    gaps_s: list[float] = []
    flagged = 0
    client = watched.connector.client(watched.seen)
    await client.connect()

    async def listen() -> None:
        heard_s = time.monotonic()
        async for frame in client.frames():
            if isinstance(frame, Heartbeat):
                gaps_s.append(time.monotonic() - heard_s)
                heard_s = time.monotonic()

    listener = asyncio.create_task(listen())
    try:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            flagged += sum(view.unusable is not None for view in watched.replica.views())
            await asyncio.sleep(POLL_S)
    finally:
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
        await client.close()
    lost = watched.replica.counters().get("session_lost.decode", 0)
    return {
        "watched_s": seconds,
        "flagged": flagged,
        "sessions_lost": lost,
        "beats": len(gaps_s),
        "longest_gap_s": max(gaps_s),
    }


async def measure(model: Path, rounds: int, watch_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        watched = Watched(model)
        watched.replica.start()
        stack.push_async_callback(watched.replica.stop)
        await stack.enter_async_context(watched.node("bystander-1"))
        async with watched.node("bystander-2"), load(watched, STREAMS):
            before = watched.replica.counters().get("session_lost.decode", 0)
            found["healthy"] = await watch(watched, watch_s)
            found["healthy"]["sessions_lost"] -= before
        print(f"healthy, both cores saturated: {found['healthy']}")
        print(f"{'fault':20} {'load':>6} {'unusable after s':>18} {'lost after s':>14}   (the slowest of {rounds})")
        for streams in (0, STREAMS):
            for title, fault in FAULTS.items():
                for number in range(rounds):
                    async with load(watched, streams):
                        times = await detect(watched, fault, f"victim-{title}-{streams}-{number}")
                    found.setdefault(f"{title}, {'loaded' if streams else 'idle'}", []).append(times)
                rows = found[f"{title}, {'loaded' if streams else 'idle'}"]
                slowest = [max((row[key] or LIMIT_S) for row in rows) for key in ("unusable_s", "lost_s")]
                print(f"{title:20} {'full' if streams else 'none':>6} {slowest[0]:18.3f} {slowest[1]:14.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the folder of the model (default: the default one)")
    parser.add_argument("--quick", action="store_true", help="each fault once, not three times")
    parser.add_argument("--watch", type=float, default=60.0, help="seconds to watch healthy nodes under load")
    options = parser.parse_args()
    folder = find(options.model, config.cache_dir(config.environment()) / "models", lambda _: None)
    found = asyncio.run(measure(folder, 1 if options.quick else 3, options.watch))
    print(json.dumps({"bench": "detection", **found}))


if __name__ == "__main__":
    main()
