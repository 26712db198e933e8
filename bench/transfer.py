"""What a block costs on its way from one process to another: `python -m bench.transfer [--quick]`.

A holder and an asker, two processes of one host; every path brings the same bytes into the asker's block memory. The
project's own frames, with the digest that each block got when it was computed, checked by the asker, over gRPC (streams
on one connection and on four; plaintext and mutual TLS) and over shared memory; beside them plain TCP into place
(`recv_into`) and a copy within one process, which check nothing; beside them Mooncake's TCP engine where
`mooncake-transfer-engine-non-cuda` is installed. What it costs the engine to digest a block is a row of its own.
Both processes have all cores, unless `--pin` gives each of them half. Rounds are interleaved; best and median of
them. Processor time is that of both processes. Prints a table and a JSON line, and never fails on a figure.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvcache import transfer
from kvcache.block_digests import BlockDigests
from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory
from pipelines.node.frame_memory import keep_frame_memory
from pipelines.node.local_client import LocalStreamClient
from pipelines.node.local_server import LocalServer
from pipelines.node.session_service import grpc_server
from pipelines.node.stream_client import StreamClient
from pipelines.node.stream_port import StreamPort
from pipelines.node.stream_service import StreamMethod
from pipelines.types.frames import PrefillTarget
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.credentials import Credentials, TlsFiles
from pronghorn.ids import Incarnation, NodeName
from pronghorn.wire import FETCH_METHOD, GRPC_ENVIRONMENT
from tests.fakes.certificates import Authority

KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 256 * MIB
MODEL = KVLayout("smollm2-135m-instruct", "float32", block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64)
BLOCKS = {"64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": MIB, "model (720 KiB)": MODEL.block_bytes}
TIMEOUT_S = 120.0
MOONCAKE_BATCH = 16
CORES = sorted(os.sched_getaffinity(0))
HOLDERS_CORES, ASKERS_CORES = CORES[: max(1, len(CORES) // 2)], CORES[len(CORES) // 2 :]
TCP, COPY, SEAL, SHARED = "TCP recv_into", "copy in one process", "digest, when computed", "shared memory"


class Ask(msgspec.Struct, frozen=True):
    """The blocks from `first` to `last`, numbers that go round the pool. Each of several streams asks for a stretch:
    one that came back to the same few blocks would read them from a cache."""

    first: int
    last: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.last)


class Spoken(msgspec.Struct, frozen=True):
    """What the holder says of itself."""

    grpc_port: int
    tls_port: int
    tcp_port: int
    mooncake: tuple[str, int] | None
    """Where its Mooncake engine is, and the address of its memory."""
    incarnation: str


# --- the holder -------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, block_bytes: int) -> None:
        self.memory = new_pool(block_bytes)
        self.digests = BlockDigests(self.memory)
        for block in range(self.memory.num_blocks):
            self.memory.block(block)[:] = os.urandom(block_bytes)
            self.digests.seal(block)

    async def frames(self, data: bytes, carriage: transfer.Carriage) -> AsyncGenerator[bytes, None]:
        """As a fetch goes: a frame's blocks at a time."""
        ask = msgspec.json.decode(data, type=Ask)
        sent: dict[int, bytes] = {}
        step = carriage.blocks_per_frame(self.memory.block_bytes)
        for first in range(0, len(ask.numbers), step):
            numbers = ask.numbers[first : first + step]
            for frame in carriage.encode(((n, block_of(self.memory, n)) for n in numbers), sent):
                yield frame
        yield transfer.encode_commit(sent)

    def serve_tcp(self, listener: socket.socket) -> None:
        while True:
            connected, _ = listener.accept()
            with connected:
                while data := connected.recv(1024):
                    ask = msgspec.json.decode(data, type=Ask)
                    for number in ask.numbers:
                        connected.sendall(block_of(self.memory, number))


class Mooncake:
    """Mooncake's engine over TCP, where it is installed."""

    def __init__(self, memory: BlockMemory) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        self._block_bytes, self._num_blocks = memory.block_bytes, memory.num_blocks
        assert self._engine.register_memory(self.at, self._block_bytes * self._num_blocks) == 0
        self.name = f"127.0.0.1:{self._engine.get_rpc_port()}"

    @staticmethod
    def installed() -> bool:
        try:
            importlib.import_module("mooncake.engine")
        except ModuleNotFoundError:
            return False
        except ImportError as error:
            print(f"Mooncake is installed and cannot be loaded: {error}", file=sys.stderr)
            return False
        return True

    async def read(self, holder: tuple[str, int], blocks: int) -> None:
        name, there = holder
        places = [number % self._num_blocks * self._block_bytes for number in range(blocks)]
        for first in range(0, blocks, MOONCAKE_BATCH):
            batch = places[first : first + MOONCAKE_BATCH]
            ours, theirs = [self.at + place for place in batch], [there + place for place in batch]
            assert self._engine.batch_transfer_sync_read(name, ours, theirs, [self._block_bytes] * len(batch)) == 0


async def hold(incarnation: Incarnation, tls: TlsFiles, block_bytes: int) -> None:
    keep_frame_memory()  # as a node does
    holder = Holder(block_bytes)
    method = StreamMethod(FETCH_METHOD, holder.frames)
    server = grpc_server()
    digest_of = holder.digests.digest
    server.add_generic_rpc_handlers([method.handler(digest_of)])
    port = server.add_insecure_port("127.0.0.1:0")
    tls_port = Credentials(tls).add_port(server, "127.0.0.1:0")
    await server.start()
    local = LocalServer(incarnation, [method], holder.memory, Counters(), digest_of=digest_of)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=holder.serve_tcp, args=(listener,), daemon=True).start()
    mooncake = Mooncake(holder.memory) if Mooncake.installed() else None
    told = None if mooncake is None else (mooncake.name, mooncake.at)
    spoken = Spoken(port, tls_port, listener.getsockname()[1], told, incarnation)
    print(msgspec.json.encode(spoken).decode(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await local.stop()
    await server.stop(None)


# --- the asker --------------------------------------------------------------------------------------------------------


def new_pool(block_bytes: int) -> BlockMemory:
    return BlockMemory.create(POOL_BYTES // block_bytes, block_bytes)


def block_of(memory: BlockMemory, number: int) -> memoryview:
    return memory.block(number % memory.num_blocks)


Way = Callable[[int], Awaitable[None]]
"""Brings so many blocks."""


class Asker:
    def __init__(self, spoken: Spoken, tls: TlsFiles, block_bytes: int) -> None:
        self._tls = tls
        self.memory = new_pool(block_bytes)
        self._spoken = spoken
        self._clock = SystemClock()
        self._copied = new_pool(block_bytes)
        self._clients: list[StreamPort] = []

    def client(self, tls: TlsFiles | None = None) -> StreamClient:
        client = StreamClient(FETCH_METHOD, self._clock, 60.0, credentials=Credentials(tls))
        self._clients.append(client)
        return client

    def paths(self) -> dict[str, Way]:
        one, four = self.client(), [self.client() for _ in range(4)]
        local = LocalStreamClient(FETCH_METHOD, self.client(), self._clock, 60.0, Counters())
        self._clients.append(local)
        tls = [self.client(self._tls) for _ in range(4)]
        paths: dict[str, Way] = {
            TCP: self.tcp,
            COPY: self.copy,
            SEAL: self.seal,
            "gRPC, 1 connection": self.streams([one]),
            "gRPC, 1 connection, 64 streams": self.streams([one] * 64),
            "gRPC, 4 connections": self.streams(four),
            "gRPC and TLS, 1 connection": self.streams(tls[:1], self._spoken.tls_port),
            "gRPC and TLS, 4 connections": self.streams(tls, self._spoken.tls_port),
            SHARED: self.streams([local]),
            f"{SHARED}, 64 streams": self.streams([local] * 64),
        }
        if self._spoken.mooncake is not None:
            paths["Mooncake, TCP, batches of 16"] = partial(Mooncake(self.memory).read, self._spoken.mooncake)
        return paths

    def streams(self, clients: list[Any], port: int | None = None) -> Way:
        address = f"127.0.0.1:{port or self._spoken.grpc_port}"
        target = PrefillTarget(NodeName("holder"), address, Incarnation(self._spoken.incarnation))

        async def path(blocks: int) -> None:
            ends = [blocks * number // len(clients) for number in range(len(clients) + 1)]
            asks = [Ask(first, last) for first, last in itertools.pairwise(ends)]
            await asyncio.gather(*(self._fetch(client, target, ask) for client, ask in zip(clients, asks, strict=True)))

        return path

    async def _fetch(self, client: StreamPort, target: PrefillTarget, ask: Ask) -> None:
        destinations = {n: block_of(self.memory, n) for n in ask.numbers}
        receiver = transfer.BlockReceiver(destinations)
        async with client.stream(target, msgspec.json.encode(ask), TIMEOUT_S) as stream:
            while not receiver.committed:
                match await stream.read():
                    case transfer.BlocksFrame() as frame:
                        stream.take(frame, receiver)
                    case transfer.CommitFrame() as commit:
                        receiver.commit(commit)
                    case other:
                        sys.exit(f"the holder sent {other!r}")

    async def tcp(self, blocks: int) -> None:
        with socket.create_connection(("127.0.0.1", self._spoken.tcp_port)) as connected:
            connected.sendall(msgspec.json.encode(Ask(0, blocks)))
            for number in range(blocks):
                view = block_of(self.memory, number)
                while view:
                    view = view[connected.recv_into(view) :]

    async def copy(self, blocks: int) -> None:
        for number in range(blocks):
            block_of(self.memory, number)[:] = block_of(self._copied, number)

    async def seal(self, blocks: int) -> None:
        digests = BlockDigests(self._copied)
        for number in range(blocks):
            digests.seal(number % self._copied.num_blocks)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self.memory.close()
        self._copied.close()


ROOT = Path(__file__).parent.parent
"""The holder finds this module there: `bench` is not installed."""


# --- all of it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def holder_process(tls: TlsFiles, block_bytes: int) -> Iterator[tuple[subprocess.Popen[bytes], Spoken]]:
    told = [os.urandom(16).hex(), os.path.dirname(tls.ca), str(block_bytes)]
    command = [sys.executable, "-m", "bench.transfer", "--hold", *told]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:  # Mooncake talks there too
                if line.startswith(b"{"):
                    break
            yield process, msgspec.json.decode(line, type=Spoken)
        finally:
            process.kill()


def processor_s(*processes: psutil.Process) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


async def measure(total_bytes: int, rounds: int, only: str, pinned: bool) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tls = Authority("bench").issue(Path(folder))
        for size, block_bytes in BLOCKS.items():
            with holder_process(tls, block_bytes) as (process, spoken):
                if pinned:
                    os.sched_setaffinity(process.pid, HOLDERS_CORES)
                    os.sched_setaffinity(0, ASKERS_CORES)
                both = psutil.Process(), psutil.Process(process.pid)
                asker = Asker(spoken, tls, block_bytes)
                paths = {name: path for name, path in asker.paths().items() if only in name or name == TCP}
                taken = await in_turn(paths, total_bytes // block_bytes, block_bytes, rounds, both)
                await asker.close()
                os.sched_setaffinity(0, CORES)
            rows += [row(name, size, figures, taken[TCP]) for name, figures in taken.items()]
    return rows


async def in_turn(
    paths: dict[str, Way], blocks: int, block_bytes: int, rounds: int, both: tuple[psutil.Process, psutil.Process]
) -> dict[str, list[tuple[float, float]]]:
    """Of each path, GB/s and processor seconds for a GB, in each round."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    gigabytes = blocks * block_bytes / 1e9
    for number in range(rounds + 1):
        for name, path in paths.items():
            began_s, used_s = time.perf_counter(), processor_s(*both)
            await path(blocks)
            figures = gigabytes / (time.perf_counter() - began_s), (processor_s(*both) - used_s) / gigabytes
            if number > 0:  # the first warms up: connections, mappings, pages
                taken[name].append(figures)
    return taken


def row(name: str, size: str, figures: list[tuple[float, float]], tcp: list[tuple[float, float]]) -> dict[str, Any]:
    rates = [rate for rate, _ in figures]
    ratios = [rate / beside for (rate, _), (beside, _) in zip(figures, tcp, strict=True)]
    return {
        "path": name,
        "block": size,
        "best_gb_per_s": max(rates),
        "median_gb_per_s": statistics.median(rates),
        "best_to_tcp": max(rates) / max(rate for rate, _ in tcp),
        "median_to_tcp": statistics.median(ratios),
        "processor_s_per_gb": statistics.median(used_s for _, used_s in figures),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'path':36} {'block':16} {'GB/s best':>10} {'median':>8} {'to TCP best':>12} {'median':>8} {'CPU s/GB':>9}")
    for size in BLOCKS:
        for r in rows:
            if r["block"] == size:
                print(
                    f"{r['path']:36} {size:16} {r['best_gb_per_s']:10.2f} {r['median_gb_per_s']:8.2f} "
                    f"{r['best_to_tcp']:12.2f} {r['median_to_tcp']:8.2f} {r['processor_s_per_gb']:9.2f}"
                )
    print(json.dumps({"rows": rows}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="128 MiB and two rounds")
    options.add_argument("--mib", type=int, default=1024, help="so many MiB each time; 1024 where nothing is said")
    options.add_argument("--rounds", type=int, default=5, help="so many times; 5 where nothing is said")
    options.add_argument("--only", default="", help="only paths that have this in their name, and TCP")
    options.add_argument("--pin", action="store_true", help="each process on half of the cores")
    options.add_argument("--hold", nargs=3, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.hold is not None:
        incarnation, folder, block_bytes = asked.hold
        asyncio.run(hold(Incarnation(incarnation), TlsFiles.in_folder(folder), int(block_bytes)))
        return
    if not GRPC_ENVIRONMENT.items() <= os.environ.items():  # read when gRPC is imported; nodes are started with it
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.transfer", *sys.argv[1:]], os.environ | GRPC_ENVIRONMENT
        )
    mib, rounds = (128, 2) if asked.quick else (asked.mib, asked.rounds)
    keep_frame_memory()
    show(asyncio.run(measure(mib * MIB, rounds, asked.only, asked.pin)))


if __name__ == "__main__":
    main()
