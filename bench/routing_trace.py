"""The router on traces, on virtual time: `python -m bench.routing_trace`.

The real router, index and admission over the simulator's model of each node (`cluster/simulator/load_model.py`). Three
traces: nothing shared; 26 % of the prompt tokens shared, some prefixes far more common than others; conversations of
many turns. Each is offered at a ladder of rates, as shares of what the prefill nodes could compute without any reuse,
up to saturation, under each policy on the same split of nodes; and under kv_aware without prefill nodes, all of them
computing and decoding ("aggregated"). Prints tables and a JSON line; what is wanted is marked, and it never fails on a
figure. The same seed gives the same figures. Beside it, where `ai-dynamo-runtime` is installed, what the KV router of
Dynamo's mocker finds again of the same prompts (`bench/dynamo_replay.py`).

As many requests are under way as decode nodes have slots, the others wait for admission, as behind an orchestrator:
where a request is sent on its arrival and then waits for minutes, all that was known of the nodes is long out of date.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np

from bench import dynamo_replay
from cluster.simulator.load_model import LoadModel, LoadResult, NodeTiming
from cluster.simulator.load_report import make_router
from cluster.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest, make_up
from orchestrator.admission import Admission, Limits
from orchestrator.holdings import Holdings
from pronghorn.counters import Counters

POLICIES = ("kv_aware", "least_request", "round_robin", "prefix_aware")
BLIND = ("least_request", "round_robin")
LADDER = (0.3, 0.6, 0.9, 1.2, 2.0, 3.0)
SHARED = 0.26
PREFIXES = 100
WORSE = 1.05
"""The most that kv_aware may take of what a blind policy takes."""
P_D_LEAST = 0.95
"""Of the aggregated goodput (requests within both of the load model's goals), with prefill and decode apart."""
FEW_GOOD = 0.05
"""A share of the requests. Where both have fewer good ones, what they serve is compared."""

COLUMNS = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "p99 ms",
    "inter_token_p99_ms": "ITL p99",
    "end_to_end_mean_s": "E2E s",
    "goodput_per_s": "good/s",
    "served_per_s": "served/s",
    "reuse_percent": "reuse %",
}
"""Figures of `told`, and their names in the tables."""

Trace = Callable[[Random, int, float], Iterator[TraceRequest]]


def nothing_shared(random: Random, count: int, requests_per_s: float) -> Iterator[TraceRequest]:
    at_s, next_id = 0.0, 0
    for _ in range(count):
        at_s += random.expovariate(requests_per_s)
        tokens, output_tokens = _lengths(random)
        blocks = tokens // TRACE_BLOCK_TOKENS
        yield TraceRequest(at_s, tokens, output_tokens, tuple(range(next_id, next_id + blocks)))
        next_id += blocks


def quarter_shared(random: Random, count: int, requests_per_s: float) -> Iterator[TraceRequest]:
    at_s, next_id = 0.0, 1 << 32
    for _ in range(count):
        at_s += random.expovariate(requests_per_s)
        tokens, output_tokens = _lengths(random)
        blocks = tokens // TRACE_BLOCK_TOKENS
        exact = SHARED * tokens / TRACE_BLOCK_TOKENS
        shared = min(blocks, int(exact) + (random.random() < exact % 1.0))
        which = min(PREFIXES, int(random.paretovariate(0.9))) - 1
        prefix = range(which * 1024, which * 1024 + shared)
        yield TraceRequest(at_s, tokens, output_tokens, (*prefix, *range(next_id, next_id + blocks - shared)))
        next_id += blocks


def _lengths(random: Random) -> tuple[int, int]:
    return 512 + int(random.lognormvariate(7.3, 0.8)), 1 + min(2000, int(random.lognormvariate(4.8, 0.8)))


TRACES: dict[str, Trace] = {
    "nothing shared": nothing_shared,
    "26 % shared": quarter_shared,
    "multi-turn": make_up,
}


def play(trace: Trace, policy: str, prefill: int, decode: int, rate: float, count: int, seed: int) -> LoadResult:
    timing = NodeTiming()
    holdings = Holdings(1 << 28, Counters())
    slots = decode * timing.max_batch
    router = make_router(policy, holdings, timing, seed)
    model = LoadModel(prefill, decode, router, holdings, Admission(Limits(slots, 1 << 20)), timing)
    return model.run(requests(trace, count, rate, seed))


def requests(trace: Trace, count: int, rate: float, seed: int) -> Iterator[TraceRequest]:
    return trace(Random(f"routing-trace/{seed}"), count, rate)


def capacity(trace: Trace, nodes: int, seed: int) -> float:
    """Requests a second whose prompts so many nodes could compute without any reuse."""
    sample = list(trace(Random(f"routing-trace/{seed}"), 2000, 1.0))
    mean_tokens = sum(request.prompt_tokens for request in sample) / len(sample)
    return nodes * NodeTiming().prefill_tokens_per_s / mean_tokens


def told(result: LoadResult, offered_s: float) -> dict[str, float]:
    ttft_ms = 1e3 * np.array(result.ttft_s)
    return {
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "inter_token_p99_ms": 1e3 * float(np.percentile(result.inter_token_s, 99)),
        "end_to_end_mean_s": float(np.mean(result.end_to_end_s)),
        "goodput_per_s": result.good / offered_s,
        "served_per_s": len(result.ended) / result.virtual_s,
        "reuse_percent": 100.0 * result.reused_tokens / result.prompt_tokens,
    }


def run(nodes: int, count: int, seed: int) -> dict[str, Any]:
    half = nodes // 2
    ways = [(policy, policy, half, nodes - half) for policy in POLICIES] + [("aggregated", "kv_aware", 0, nodes)]
    found: dict[str, Any] = {}
    full_per_s = {name: capacity(trace, half, seed) for name, trace in TRACES.items()}
    for name, trace in TRACES.items():
        found[name] = {}
        for share in LADDER:
            rate = share * full_per_s[name]
            figures = {
                way: told(play(trace, policy, prefill, decode, rate, count, seed), count / rate)
                for way, policy, prefill, decode in ways
            }
            if dynamo_replay.installed():
                figures["dynamo"] = dynamo_replay.replay(
                    requests(trace, count, rate, seed), half, nodes - half, NodeTiming()
                )
            found[name][f"{share:.1f}"] = figures
    return {
        "nodes": nodes,
        "requests": count,
        "seed": seed,
        "traces": found,
        "verdict": verdict(found, full_per_s),
    }


def verdict(found: dict[str, Any], offered_per_s: dict[str, float]) -> list[str]:
    """What was wanted and does not hold; the margins at saturation. `offered_per_s`: by trace, at 1.0."""
    said = []
    for name, ladder in found.items():
        for share, ways in ladder.items():
            ours = ways["kv_aware"]
            for blind in BLIND:
                for figure in ("ttft_p50_ms", "ttft_p99_ms"):
                    if ours[figure] > WORSE * ways[blind][figure]:
                        both = f"{ours[figure]:.0f}, {blind} {ways[blind][figure]:.0f}"
                        said.append(f"NOT HELD {name} at {share}: {figure} {both}")
            together = ways["aggregated"]
            few = FEW_GOOD * float(share) * offered_per_s[name]
            figure = "goodput_per_s" if max(w["goodput_per_s"] for w in (ours, together)) >= few else "served_per_s"
            if ours[figure] < P_D_LEAST * together[figure]:
                both = f"{ours[figure]:.2f}, aggregated {together[figure]:.2f}"
                said.append(f"NOT HELD {name} at {share}: {figure} apart {both}")
            theirs = ways.get("dynamo")
            if theirs is not None and ours["reuse_percent"] < theirs["reuse_percent"]:
                both = f"{ours['reuse_percent']:.2f}, Dynamo's mocker {theirs['reuse_percent']:.2f}"
                said.append(f"NOT HELD {name} at {share}: reuse_percent {both}")
        top = ladder[max(ladder, key=float)]
        for blind in BLIND:
            margins = ", ".join(
                f"{figure} {top[blind][figure] / top['kv_aware'][figure]:.2f}x"
                for figure in ("ttft_p50_ms", "ttft_p99_ms")
            )
            said.append(f"{name} at saturation: {blind} takes, of kv_aware's, {margins}")
    return said


def show(result: dict[str, Any]) -> None:
    for name, ladder in result["traces"].items():
        print(f"\n{name}: {result['requests']} requests on {result['nodes']} nodes")
        print(f"{'rate':>5} {'policy':14}" + "".join(f"{column:>10}" for column in COLUMNS.values()))
        for share, ways in ladder.items():
            for way, f in ways.items():
                print(f"{share:>5} {way:14}" + "".join(f"{f.get(name, float('nan')):10.2f}" for name in COLUMNS))
    print()
    for line in result["verdict"]:
        print(line)
    print(json.dumps(result))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nodes", type=int, default=8, help="half of them prefill nodes")
    options.add_argument("--requests", type=int, default=3000, help="for each figure")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    show(run(asked.nodes, asked.requests, asked.seed))


if __name__ == "__main__":
    main()
