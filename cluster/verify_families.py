"""`pronghorn verify parity --all-families`: of each family of models, with random weights, one process's logits beside
those of `transformers`, and the tokens of a prefill and a decode node beside one process's.

The nodes are real ones that speak gRPC on loopback; their engines are threads of this process, and the registry is in
its memory, so that a family takes seconds. A process of its own, since it holds models.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import decode_nodes.engine
import prefill_nodes.engine
from cluster.random_models import FOREIGN_MODELS, RANDOM_MODELS, RandomModel, write_random_model
from cluster.verify_cases import parity_cases
from cluster.verify_logits import TOLERANCE, LogitsReport, compare_logits
from cluster.verify_parity import Members, TokensReport, compare_tokens
from cluster.verify_reference import OneProcess
from decode_nodes.config import DecodeNodeConfig
from decode_nodes.node import DecodeNode
from kvcache.memory import BlockMemory
from kvcache.memory_registry import MemoryRegistry
from orchestrator.assembly import identify, start_replica
from orchestrator.config import OrchestratorConfig
from pipelines.node.config import NodeConfig
from pipelines.node.stream_client import IDLE_CHANNEL_S, StreamClient
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.loop import EngineParts
from pipelines.runtime.thread import ThreadEngine
from prefill_nodes.config import PrefillNodeConfig
from prefill_nodes.node import PrefillNode
from pronghorn.clock import SystemClock
from pronghorn.ids import NodeName
from pronghorn.wire import FETCH_METHOD, PREFILL_METHOD

SEED = 20261
TOKENS = 8
NUM_BLOCKS = 64
ShortType = Literal["bfloat16", "float16"]
SHORT_STORAGE: dict[ShortType, float] = {"bfloat16": 0.1, "float16": 0.0125}
"""How far logits may be off, root mean square, as a share of their spread. When the lines were drawn the farthest of
the random models below was off by 0.064 and by 0.008: eight bits of a number make a share of 2^-9, eleven 2^-12."""

ROUTED_SLACK = 3.0
"""These lines times so much for a mixture of experts, which was off by 0.175 and 0.003."""

Build = Callable[[EngineConfig, bytes, BlockMemory], EngineParts]


@dataclass(frozen=True)
class FamilyReport:
    name: str
    architecture: str
    logits: LogitsReport
    short: dict[ShortType, LogitsReport]
    tokens: TokensReport
    slack: float

    @property
    def agrees(self) -> bool:
        lines = {dtype: line * self.slack for dtype, line in SHORT_STORAGE.items()}
        short = all(report.relative_difference <= lines[dtype] for dtype, report in self.short.items())
        compared = sum(self.tokens.verdicts.values()) > 0
        return self.logits.agrees and short and compared and not self.tokens.faults


async def compare_family(name: str, model: RandomModel, every: int = 1) -> FamilyReport:
    """With every n-th of the prompts around block borders."""
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(model, Path(folder))
        engine = EngineConfig(model_path=folder, model_name=name, num_blocks=NUM_BLOCKS)
        logits = compare_logits(engine)
        short = {
            dtype: compare_logits(EngineConfig(model_path=folder, model_name=name, num_blocks=NUM_BLOCKS, dtype=dtype))
            for dtype in SHORT_STORAGE
        }
        tokens = await compare_pools(engine, every)
        architecture = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return FamilyReport(name, architecture, logits, short, tokens, ROUTED_SLACK if model.routed else 1.0)


async def compare_pools(engine: EngineConfig, every: int = 1) -> TokensReport:
    """Prompts around block borders, the decode node's cache cold and warm."""
    reference = OneProcess(engine)
    ready = await reference.start()
    try:
        async with _pools(engine) as members:
            cases = list(parity_cases(engine.block_tokens, ready.vocab_size, SEED, quick=True))[::every]
            return await compare_tokens(
                members, reference, cases, TOKENS, engine.block_tokens, 1, Progress(disable=True)
            )
    finally:
        await reference.stop()


@asynccontextmanager
async def _pools(engine: EngineConfig) -> AsyncIterator[Members]:
    """A prefill node, a decode node and an orchestrator that has found them."""
    clock = SystemClock()
    registry = MemoryRegistry(clock)
    seed = await registry.cluster_seed()
    node = NodeConfig(engine, redis_url="", key_prefix="")

    def engine_of(build: Build, name: str) -> ThreadEngine:
        memory = BlockMemory.create(engine.total_blocks, layout_of(engine).block_bytes)
        return ThreadEngine(build, engine, seed, memory, name=name)

    prefill = PrefillNode(
        name=NodeName("prefill"),
        config=PrefillNodeConfig(node),
        hash_seed=seed,
        fetch=StreamClient(FETCH_METHOD, clock, IDLE_CHANNEL_S),
        engine=engine_of(prefill_nodes.engine.build, "prefill"),
        registry=registry,
        clock=clock,
    )
    decode = DecodeNode(
        name=NodeName("decode"),
        config=DecodeNodeConfig(node),
        hash_seed=seed,
        fetch=StreamClient(FETCH_METHOD, clock, IDLE_CHANNEL_S),
        engine=engine_of(decode_nodes.engine.build, "decode"),
        registry=registry,
        prefill=StreamClient(PREFILL_METHOD, clock, 60.0),
        clock=clock,
    )
    config = OrchestratorConfig("", "", engine.model_name, engine.model_path, max_length=512)
    replica = None
    try:
        for each in (prefill, decode):
            await each.start()
            await each.shell.check_health()
        replica = await start_replica(await identify("verify-families", config, registry), config, registry)
        members = Members(replica, config)
        await members.join()
        yield members
    finally:
        if replica is not None:
            await replica.stop()
        for each in (prefill, decode):
            await each.shell.stop()


def show(reports: list[FamilyReport], console: Console) -> bool:
    table = Table("model, random weights", "architecture", "float32", *SHORT_STORAGE, "P/D tokens equal", "agrees")
    for report in reports:
        verdicts = report.tokens.verdicts
        table.add_row(
            report.name,
            report.architecture,
            f"{report.logits.largest_difference:.1e}",
            *(f"{short.relative_difference:.3f}" for short in report.short.values()),
            f"{verdicts['equal']} of {sum(verdicts.values())} ({verdicts['near tie']} near ties)",
            "yes" if report.agrees else "NO",
        )
    console.print(table)
    lines = ", ".join(f"{line} in {dtype}" for dtype, line in SHORT_STORAGE.items())
    console.print(f"float32: the largest difference to a logit of transformers (at most {TOLERANCE:g})")
    console.print(f"short storage: root mean square of the differences over the logits' spread (at most {lines})")
    for report in reports:
        for fault in report.tokens.faults:
            console.print(f"  {report.name}: {fault}", soft_wrap=True)
    return bool(reports) and all(report.agrees for report in reports)


async def compare_all(console: Console) -> list[FamilyReport]:
    with Progress(console=console, transient=True) as bar:
        models = RANDOM_MODELS | FOREIGN_MODELS
        task = bar.add_task("families", total=len(models))
        reports = []
        for name, model in models.items():
            reports.append(await compare_family(name, model))
            bar.advance(task)
    return reports


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    agreed = show(asyncio.run(compare_all(console)), console)
    console.print("all agree" if agreed else "[red]they do not agree[/red]")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
