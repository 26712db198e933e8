"""What a block costs on its way from one process to another: `python -m bench.transfer [--quick]`.

A holder and an asker, two processes of one host; every path brings the same bytes into the asker's block memory. The
project's own frames, with a digest of each block made by the holder and checked by the asker, over gRPC (streams on one
connection and on four; plaintext and mutual TLS) and over shared memory; beside them plain TCP into place (`recv_into`)
and a copy within one process, which check nothing; beside them Mooncake's TCP engine where
`mooncake-transfer-engine-non-cuda` is installed. A block leaves for the first time, as in a hand-over, and the holder
digests it, except in paths that say "again", as in a fetch of what another has fetched before. Each process has half of
the cores, on every path, so that no figure depends on where the kernel happens to put them. Rounds are interleaved;
best and median of them. Processor time is that of both processes. Prints a table and a JSON line, and never fails on a
figure.
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
from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory
from kvcache.served_digests import ServedDigests
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
TCP, COPY, SHARED = "TCP recv_into", "copy in one process", "shared memory"


class Ask(msgspec.Struct, frozen=True):
    """The blocks from `first` to `last`, numbers that go round the pool. Each of several streams asks for a stretch:
    one that came back to the same few blocks would read them from a cache."""

    block_bytes: int
    first: int
    last: int
    again: bool = False
    """The blocks have left before, and are as they were then."""

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
    def __init__(self) -> None:
        self.memory = BlockMemory.create(1, POOL_BYTES)
        whole = self.memory.block(0)
        for start in range(0, POOL_BYTES, MIB):
            whole[start : start + MIB] = os.urandom(MIB)

    def block(self, number: int, block_bytes: int) -> memoryview:
        return block_of(self.memory, number, block_bytes)

    async def frames(self, data: bytes, carriage: transfer.Carriage) -> AsyncGenerator[bytes, None]:
        """As a fetch goes: a frame's blocks at a time."""
        ask = msgspec.json.decode(data, type=Ask)
        sent: dict[int, bytes] = {}
        step = carriage.blocks_per_frame(ask.block_bytes)
        for first in range(0, len(ask.numbers), step):
            numbers = ask.numbers[first : first + step]
            if not ask.again:
                self.memory.begin_life(0)
            for frame in carriage.encode(((n, self.block(n, ask.block_bytes)) for n in numbers), sent):
                yield frame
        yield transfer.encode_commit(sent)

    def serve_tcp(self, listener: socket.socket) -> None:
        while True:
            connected, _ = listener.accept()
            with connected:
                while data := connected.recv(1024):
                    ask = msgspec.json.decode(data, type=Ask)
                    for number in ask.numbers:
                        connected.sendall(self.block(number, ask.block_bytes))


class Mooncake:
    """Mooncake's engine over TCP, where it is installed."""

    def __init__(self, memory: BlockMemory) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(memory.buffer))
        assert self._engine.register_memory(self.at, POOL_BYTES) == 0
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

    async def read(self, holder: tuple[str, int], block_bytes: int, blocks: int) -> None:
        name, there = holder
        places = [number % (POOL_BYTES // block_bytes) * block_bytes for number in range(blocks)]
        for first in range(0, blocks, MOONCAKE_BATCH):
            batch = places[first : first + MOONCAKE_BATCH]
            ours, theirs = [self.at + place for place in batch], [there + place for place in batch]
            assert self._engine.batch_transfer_sync_read(name, ours, theirs, [block_bytes] * len(batch)) == 0


async def hold(incarnation: Incarnation, tls: TlsFiles) -> None:
    pin(HOLDERS_CORES)
    keep_frame_memory()  # as a node does
    holder = Holder()
    method = StreamMethod(FETCH_METHOD, holder.frames)
    server = grpc_server()
    digest_of = ServedDigests(holder.memory).digest
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


def block_of(memory: BlockMemory, number: int, block_bytes: int) -> memoryview:
    start = number % (POOL_BYTES // block_bytes) * block_bytes
    return memory.block(0)[start : start + block_bytes]


def pin(cores: list[int]) -> None:
    """This process and its children to come."""
    os.sched_setaffinity(0, cores)


Way = Callable[[int, int], Awaitable[None]]
"""Brings so many blocks of so many bytes."""


class Asker:
    def __init__(self, spoken: Spoken, tls: TlsFiles) -> None:
        self._tls = tls
        self.memory = BlockMemory.create(1, POOL_BYTES)
        self._spoken = spoken
        self._clock = SystemClock()
        self._copied = BlockMemory.create(1, POOL_BYTES)
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
            "gRPC, 1 connection": self.streams([one]),
            "gRPC, 1 connection, again": self.streams([one], again=True),
            "gRPC, 1 connection, 64 streams": self.streams([one] * 64),
            "gRPC, 4 connections": self.streams(four),
            "gRPC and TLS, 1 connection": self.streams(tls[:1], self._spoken.tls_port),
            "gRPC and TLS, 4 connections": self.streams(tls, self._spoken.tls_port),
            SHARED: self.streams([local]),
            f"{SHARED}, again": self.streams([local], again=True),
            f"{SHARED}, 64 streams": self.streams([local] * 64),
        }
        if self._spoken.mooncake is not None:
            paths["Mooncake, TCP, batches of 16"] = partial(Mooncake(self.memory).read, self._spoken.mooncake)
        return paths

    def streams(self, clients: list[Any], port: int | None = None, *, again: bool = False) -> Way:
        address = f"127.0.0.1:{port or self._spoken.grpc_port}"
        target = PrefillTarget(NodeName("holder"), address, Incarnation(self._spoken.incarnation))

        async def path(block_bytes: int, blocks: int) -> None:
            ends = [blocks * number // len(clients) for number in range(len(clients) + 1)]
            asks = [Ask(block_bytes, first, last, again) for first, last in itertools.pairwise(ends)]
            await asyncio.gather(*(self._fetch(client, target, ask) for client, ask in zip(clients, asks, strict=True)))

        return path

    async def _fetch(self, client: StreamPort, target: PrefillTarget, ask: Ask) -> None:
        destinations = {n: block_of(self.memory, n, ask.block_bytes) for n in ask.numbers}
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

    async def tcp(self, block_bytes: int, blocks: int) -> None:
        with socket.create_connection(("127.0.0.1", self._spoken.tcp_port)) as connected:
            connected.sendall(msgspec.json.encode(Ask(block_bytes, 0, blocks)))
            for number in range(blocks):
                view = block_of(self.memory, number, block_bytes)
                while view:
                    view = view[connected.recv_into(view) :]

    async def copy(self, block_bytes: int, blocks: int) -> None:
        for number in range(blocks):
            block_of(self.memory, number, block_bytes)[:] = block_of(self._copied, number, block_bytes)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


ROOT = Path(__file__).parent.parent
"""The holder finds this module there: `bench` is not installed."""


# --- all of it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def holder_process(tls: TlsFiles) -> Iterator[tuple[subprocess.Popen[bytes], Spoken]]:
    command = [sys.executable, "-m", "bench.transfer", "--hold", os.urandom(16).hex(), os.path.dirname(tls.ca)]
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


async def measure(total_bytes: int, rounds: int, only: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        tls = Authority("bench").issue(Path(folder))
        return await measure_between(total_bytes, rounds, only, tls)


async def measure_between(total_bytes: int, rounds: int, only: str, tls: TlsFiles) -> list[dict[str, Any]]:
    with holder_process(tls) as (process, spoken):
        pin(ASKERS_CORES)
        both = psutil.Process(), psutil.Process(process.pid)
        keep_frame_memory()
        asker = Asker(spoken, tls)
        paths = {name: path for name, path in asker.paths().items() if only in name or name == TCP}
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(rounds + 1):
            for size, block_bytes in BLOCKS.items():
                for name, path in paths.items():
                    blocks = total_bytes // block_bytes
                    if "again" in name:
                        await path(block_bytes, blocks)
                    began_s, used_s = time.perf_counter(), processor_s(*both)
                    await path(block_bytes, blocks)
                    gigabytes = blocks * block_bytes / 1e9
                    figures = gigabytes / (time.perf_counter() - began_s), (processor_s(*both) - used_s) / gigabytes
                    if number > 0:  # the first warms up: connections, mappings, pages
                        taken.setdefault((name, size), []).append(figures)
        await asker.close()
    return [row(name, size, figures, taken[TCP, size]) for (name, size), figures in taken.items()]


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
    options.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.hold is not None:
        asyncio.run(hold(Incarnation(asked.hold[0]), TlsFiles.in_folder(asked.hold[1])))
        return
    if not GRPC_ENVIRONMENT.items() <= os.environ.items():  # read when gRPC is imported; nodes are started with it
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.transfer", *sys.argv[1:]], os.environ | GRPC_ENVIRONMENT
        )
    mib, rounds = (128, 2) if asked.quick else (asked.mib, asked.rounds)
    show(asyncio.run(measure(mib * MIB, rounds, asked.only)))


if __name__ == "__main__":
    main()
