"""The router's costs on one core: `python -m bench.router`.

Chains of 4,096 blocks of 16 tokens share a system prompt of 64 blocks, which every node holds; each chain lies on one
node whole and on another in part, 1 M pairs of a node and a block in all. Half of the queries leave their chain in the
middle. Every answer is checked against a brute force over sets. Beside it, where `ai-dynamo-runtime` is installed:
Dynamo's RadixTree through its Python binding, with the same keys and events. Prints a table and a JSON line, and never
fails on a figure; times are CPU time of the whole process, so that neighbours count little, the best of their repeats.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvcache.hashing import HashAlgo
from orchestrator.block_index import BlockIndex
from orchestrator.holdings import Holdings
from orchestrator.nodes import NodeView
from orchestrator.prompt_keys import PromptBlocks, PromptKeys
from orchestrator.routing.break_even import Speeds
from orchestrator.routing.facts import RequestFacts, Route
from orchestrator.routing.pick import Turn
from orchestrator.routing.policies import Setting, make_policy
from orchestrator.routing.reservation import Reservations
from orchestrator.routing.router import PolicyRouter
from pipelines.types.frames import BlockEvents, BlocksStored
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.ids import Incarnation, NodeName

BLOCK_TOKENS = 16
CHAIN_BLOCKS = 4096
SHARED_BLOCKS = 64
EVENT_BLOCKS = 128
QUERIES = 30
Row = tuple[str, float, str, float | None]
"""What, the figure, its unit, the most that it should be (a rate: the least)."""


@dataclass
class Workload:
    """Who holds what, as the events that tell it."""

    nodes: int
    chains: list["array[int]"]
    held: list[tuple[int, int, int]] = field(default_factory=list)
    """Node, chain, and how many blocks of it."""

    @property
    def entries(self) -> int:
        shared = {node for node, _, _ in self.held}
        return sum(depth - SHARED_BLOCKS for _, _, depth in self.held) + SHARED_BLOCKS * len(shared)

    def events(self) -> Iterator[tuple[int, int | None, "array[int]"]]:
        """Node, parent and keys, 128 blocks at most, one chain after another."""
        for node, chain, depth in self.held:
            keys = self.chains[chain]
            for first in range(0, depth, EVENT_BLOCKS):
                parent = keys[first - 1] if first else None
                yield node, parent, keys[first : min(depth, first + EVENT_BLOCKS)]

    def truth(self, query: "array[int]") -> dict[int, int]:
        found: dict[int, int] = {}
        for node, chain, depth in self.held:
            keys, common = self.chains[chain], 0
            while common < min(depth, len(query)) and keys[common] == query[common]:
                common += 1
            if common:
                found[node] = max(found.get(node, 0), common)
        return found


def shared_chains(nodes: int, entries: int, random: Random) -> Workload:
    shared = _keys(random, SHARED_BLOCKS)
    work = Workload(nodes, [])
    left = entries - nodes * SHARED_BLOCKS
    own = CHAIN_BLOCKS - SHARED_BLOCKS
    while left > 0 or len({node for node, _, _ in work.held}) < nodes:
        chain = len(work.chains)
        work.chains.append(shared + _keys(random, own))
        part = random.randrange(own // 4, 3 * own // 4)
        whole, other = random.sample(range(nodes), 2) if left > 0 else (chain % nodes, (chain + 1) % nodes)
        if left > 0:
            work.held += [(whole, chain, CHAIN_BLOCKS), (other, chain, SHARED_BLOCKS + part)]
            left -= own + part
        else:
            work.held += [(node, chain, SHARED_BLOCKS) for node in range(nodes)]
    return work


def _keys(random: Random, count: int) -> "array[int]":
    return array("Q", random.randbytes(8 * count))


def queries(work: Workload, random: Random) -> list["array[int]"]:
    made = []
    for number in range(QUERIES):
        keys = work.chains[random.randrange(len(work.chains))][:]
        if number % 2:
            keys = keys[: CHAIN_BLOCKS // 2] + _keys(random, CHAIN_BLOCKS // 2)
        made.append(keys)
    return made


# --- clocks -----------------------------------------------------------------------------------------------------------


def best_us(call: Callable[[], object], repeats: int = 7, calls: int = 20) -> float:
    """Of the best repeat, a call."""
    found = []
    for _ in range(repeats):
        began_s = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - began_s) / calls)
    return 1e6 * min(found)


# --- ours -------------------------------------------------------------------------------------------------------------


def life(node: int) -> Incarnation:
    return Incarnation(f"{node:032x}")


def load(work: Workload) -> tuple[BlockIndex, float]:
    """The index, and blocks a second."""
    return fill([(life(node), parent, keys.tobytes()) for node, parent, keys in work.events()])


def fill(events: list[tuple[Incarnation, int | None, bytes]]) -> tuple[BlockIndex, float]:
    index = BlockIndex(1 << 32)
    began_s = time.process_time()
    for node, parent, keys in events:
        index.stored(node, parent, keys)
    taken_s = time.process_time() - began_s
    return index, sum(len(keys) // 8 for _, _, keys in events) / taken_s


def bytes_per_block(work: Workload) -> float:
    tracemalloc.start()
    index = load(work)[0]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / index.size().blocks


def check(index: BlockIndex, work: Workload, asked: list["array[int]"]) -> None:
    for keys in asked:
        truth = {life(node): depth for node, depth in work.truth(keys).items()}
        found = index.find(keys.tobytes())
        assert found == truth, "the index and the brute force disagree"
        best = index.find_best(keys.tobytes(), 8)
        assert sorted(best.values()) == sorted(sorted(truth.values())[-8:])
        assert all(truth[node] == depth for node, depth in best.items())


def index_rows(nodes: int, entries: int, random: Random) -> tuple[list[Row], dict[str, Any]]:
    work = shared_chains(nodes, entries, random)
    asked = queries(work, random)
    rate = max(load(work)[1] for _ in range(2))
    index, again = load(work)
    rate = max(rate, again)
    check(index, work, asked)
    packed = [keys.tobytes() for keys in asked]
    find_us = statistics.median(best_us(lambda keys=keys: index.find(keys)) for keys in packed)  # type: ignore[misc]  # mypy cannot infer it
    size = index.size()
    rows: list[Row] = [
        (f"find, 4096 blocks, {nodes} nodes", find_us, "us", 5.0 if nodes <= 64 else 10.0),
        (f"events of 128 blocks, {nodes} nodes", rate / 1e6, "M blocks/s", -1.5),
        (f"memory, {nodes} nodes", bytes_per_block(work), "bytes/block", 90.0),
        (f"removal of a node, {nodes} nodes", _removal_ms(index), "ms per 100 k blocks", 1.0),
    ]
    return rows, {
        "entries": work.entries,
        "unique_blocks": size.blocks,
        "runs": size.runs,
        "work": work,
        "asked": asked,
    }


def _removal_ms(index: BlockIndex) -> float:
    holders = index.holders()[: max(1, len(index.holders()) // 4)]
    blocks = sum(index.blocks_of(holder) for holder in holders)
    began_s = time.process_time()
    for holder in holders:
        index.dropped(holder)
    return 1e3 * (time.process_time() - began_s) * 1e5 / blocks


def one_chain_rows(nodes: int, random: Random) -> list[Row]:
    """Every node on the same chain, each at a depth of its own."""
    chain = _keys(random, CHAIN_BLOCKS)
    index, depths = BlockIndex(), {}
    for node in range(nodes):
        depths[life(node)] = CHAIN_BLOCKS * (node + 1) // nodes
        index.stored(life(node), None, chain[: depths[life(node)]].tobytes())
    packed = chain.tobytes()
    assert index.find(packed) == depths
    assert sorted(index.find_best(packed, 8).values()) == sorted(depths.values())[-8:]
    return [
        (f"one chain, best 8 of {nodes}", best_us(lambda: index.find_best(packed, 8)), "us", 10.0),
        (f"one chain, all {nodes}", best_us(lambda: index.find(packed)), "us", None),
    ]


def pause_rows(entries: int, random: Random) -> list[Row]:
    """The longest stop of the collector while the index fills and is asked, and what a whole collection takes then."""
    pauses_s = [0.0]
    began_s = 0.0

    def on_collection(phase: str, _: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.process_time()
        else:
            pauses_s.append(time.process_time() - began_s)

    work = shared_chains(64, entries, random)
    asked = [keys.tobytes() for keys in queries(work, random)]
    events = [(life(node), parent, keys.tobytes()) for node, parent, keys in work.events()]
    gc.collect()
    gc.freeze()
    gc.callbacks.append(on_collection)
    try:
        index, _ = fill(events)
        for keys in asked * 100:
            index.find(keys)
        filling_ms = 1e3 * max(pauses_s)
        pauses_s.clear()
        gc.collect()
    finally:
        gc.callbacks.remove(on_collection)
        gc.unfreeze()
    return [
        ("longest collector pause", filling_ms, "ms", 5.0),
        ("a whole collection", 1e3 * max(pauses_s), "ms", 5.0),
    ]


# --- from tokens ------------------------------------------------------------------------------------------------------


def token_rows(random: Random) -> list[Row]:
    """What a request pays from its tokens to the chosen pair, on 64 nodes of which two hold most of its prompt."""
    tokens = np.array([random.randrange(150_000) for _ in range(CHAIN_BLOCKS * BLOCK_TOKENS + 1)])
    rows: list[Row] = []
    algo: HashAlgo
    for algo in ("ahash64", "sha256"):
        prompts = PromptKeys(algo, bytes(32), "bench")
        prompts.learn({"block_tokens": str(BLOCK_TOKENS)})
        router, views, holdings = fleet(64)
        keys = prompts.blocks(tokens, None).keys
        for life_, blocks in ((views[0].incarnation, CHAIN_BLOCKS), (views[1].incarnation, CHAIN_BLOCKS // 2)):
            events = BlockEvents(1, [BlocksStored(None, keys[: 8 * blocks])], snapshot=True)
            holdings.events(life_, events, 0.0)

        def pair(prompts: PromptKeys = prompts, router: PolicyRouter = router, views: list[NodeView] = views) -> Route:
            blocks = prompts.blocks(tokens, None)
            return router.choose(RequestFacts("bench", len(tokens), keys=blocks.keys), views)

        def keys_only(prompts: PromptKeys = prompts) -> PromptBlocks:
            return prompts.blocks(tokens, None)

        route = pair()
        assert views[0].name in (route.decode.name, *(target.name for target in route.prefill))
        bound = 1.5 if algo == "ahash64" else None
        rows.append((f"65536 tokens to keys, {algo}", best_us(keys_only, 20, 3) / 1e3, "ms", None))
        rows.append((f"65536 tokens to the chosen pair, 64 nodes, {algo}", best_us(pair, 20, 3) / 1e3, "ms", bound))
    router, views, _ = fleet(1000)
    facts = RequestFacts("bench", 1000, keys=_keys(random, 62).tobytes())
    rows.append(("a choice among 1000 nodes", best_us(lambda: router.choose(facts, views)) / 1e3, "ms", 1.0))
    return rows


def fleet(count: int) -> tuple[PolicyRouter, list[NodeView], Holdings]:
    """The default router over so many idle nodes, half of each role."""
    holdings, random, speeds = Holdings(1 << 32, Counters()), Random(0), Speeds()
    policy = make_policy("kv_aware", Setting(random, lambda _: speeds, lambda: 65_536.0, False))
    turn = Turn(random)
    router = PolicyRouter(
        policy, holdings, Reservations(), SystemClock(), turn, max_prefill_candidates=3, retry_after_s=1.0
    )
    views = [
        NodeView(
            NodeName(f"{role}-{i}"), role, "bench", f"{role}-{i}:1", life(2 * i + (role == "decode")), None, 0, 0, 0
        )
        for i in range(count // 2)
        for role in ("prefill", "decode")
    ]
    return router, views, holdings


def cap_rows(random: Random) -> list[Row]:
    """Five times the blocks that the cap has room for: what it takes, of the cap, and what is found still."""
    cap = 64 * 1024 * 1024
    work = shared_chains(64, 5 * cap // 100, random)
    tracemalloc.start()
    capped = BlockIndex(cap)
    for node, parent, keys in work.events():
        capped.stored(life(node), parent, keys.tobytes())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    found = sum(bool(capped.find(keys.tobytes())) for keys in queries(work, random))
    return [
        ("memory at the cap, of the cap", taken / cap, "x", 1.2),
        (f"queries that still find something, of {QUERIES}", float(found), "", None),
    ]


# --- Dynamo -----------------------------------------------------------------------------------------------------------


def dynamo_rows(work: Workload, asked: list["array[int]"]) -> list[Row]:
    """Empty where it is not installed."""
    try:
        core = importlib.import_module("dynamo._core")
    except ImportError:
        return []
    tree = core.RadixTree()
    events = []
    for number, (node, parent, keys) in enumerate(work.events()):
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        events.append((node, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode(), len(keys)))
    began_s = time.process_time()
    for node, event, _ in events:
        tree.apply_event(node, event)
    rate = sum(count for _, _, count in events) / (time.process_time() - began_s)
    lists = [keys.tolist() for keys in asked]
    for keys, found in zip(asked, map(tree.find_matches, lists), strict=True):
        assert {worker: depth for (worker, _), depth in found.scores.items()} == work.truth(keys)
    find_us = statistics.median(best_us(lambda keys=keys: tree.find_matches(keys), 5, 5) for keys in lists)  # type: ignore[misc]  # mypy cannot infer it
    return [
        (f"Dynamo RadixTree: find, {work.nodes} nodes", find_us, "us", None),
        (f"Dynamo RadixTree: events of 128 blocks, {work.nodes} nodes", rate / 1e6, "M blocks/s", None),
    ]


# --- all of it --------------------------------------------------------------------------------------------------------


def run(entries: int, seed: int) -> dict[str, Any]:
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for nodes in (8, 64, 512):
        random = Random(f"router/{seed}/{nodes}")
        found, told = index_rows(nodes, entries, random)
        rows += found + dynamo_rows(told.pop("work"), told.pop("asked")) + one_chain_rows(nodes, random)
        facts[f"nodes_{nodes}"] = told
    rows += pause_rows(entries, Random(f"router/{seed}/pauses"))
    rows += cap_rows(Random(f"router/{seed}/cap"))
    rows += token_rows(Random(f"router/{seed}/tokens"))
    return {"facts": facts, "rows": [{"what": w, "value": v, "unit": u, "bound": b} for w, v, u, b in rows]}


def show(result: dict[str, Any]) -> None:
    print(f"{'what':58} {'figure':>10} {'unit':20} {'wanted':>10}")
    for row in result["rows"]:
        bound = row["bound"]
        wanted = "" if bound is None else f"<= {bound:g}" if bound > 0 else f">= {-bound:g}"
        print(f"{row['what']:58} {row['value']:10.2f} {row['unit']:20} {wanted:>10}")
    print(json.dumps(result))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--entries", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--core", type=int, default=None, help="run on this core; none: the last one")
    asked = options.parse_args()
    core = max(os.sched_getaffinity(0)) if asked.core is None else asked.core
    os.sched_setaffinity(0, {core})
    show(run(asked.entries, asked.seed))


if __name__ == "__main__":
    main()
