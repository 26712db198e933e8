"""`pronghorn sim --nodes`: a load set up, run and told.

Knows the split of the nodes and the rate that fills them to `UTILISATION`.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.simulator.load_model import MODEL, LoadModel, LoadNode, LoadResult, NodeTiming
from cluster.simulator.trace import TraceRequest, make_up, read
from orchestrator.admission import Admission, Limits
from orchestrator.holdings import Holdings
from orchestrator.routing.facts import RequestFacts
from orchestrator.routing.pick import Turn
from orchestrator.routing.policies import Setting, make_policy
from orchestrator.routing.reservation import Reservations
from orchestrator.routing.router import PolicyRouter
from pronghorn.clock import SystemClock
from pronghorn.counters import Counters
from pronghorn.errors import ConfigurationError
from pronghorn.ids import Incarnation

UTILISATION = 0.7
"""Of the prefill nodes, where nothing is reused."""
SAMPLE = 2000
INDEX_BYTES = 1 << 30


def run(nodes: int, requests: int, seed: int, trace: str | None, out: Console) -> None:
    """Raises ConfigurationError where there are too few nodes, or the trace is none."""
    if nodes < 2 or requests < 1:
        raise ConfigurationError(
            f"--nodes is {nodes} and --requests {requests}; a load needs a prefill and a decode node, and a request",
            param="nodes",
        )
    timing = NodeTiming()
    prefill = nodes // 2
    bound = (nodes - prefill) * timing.max_batch * 2
    holdings = Holdings(INDEX_BYTES, Counters())
    router = make_router("kv_aware", holdings, timing, seed)
    model = LoadModel(prefill, nodes - prefill, router, holdings, Admission(Limits(bound, bound)), timing)
    load: Iterator[TraceRequest]
    if trace is not None:
        load = islice(read(Path(trace)), requests)
        rate_per_s = None
    else:
        rate_per_s = prefill * timing.prefill_tokens_per_s * UTILISATION / _mean_prompt_tokens(seed)
        load = make_up(Random(f"load/{seed}"), requests, rate_per_s)
    result = model.run(load)
    out.print(_table(nodes, rate_per_s, result))
    out.print(
        f"The router over all {nodes} nodes at once would take {1e3 * _choice_s(model):.2f} ms a request; "
        f"over the least loaded ones it took {1e6 * result.routing_s / max(1, len(result.ttft_s)):.0f} us."
    )


def make_router(policy: str, holdings: Holdings, timing: NodeTiming, seed: int) -> PolicyRouter:
    """The real router, as an orchestrator has it that has learned how fast the nodes are."""
    random, speeds = Random(f"routing/{seed}"), timing.speeds()
    setting = Setting(random, lambda _: speeds, lambda: float(timing.kv_bytes_per_token), False)
    made = make_policy(policy, setting)
    return PolicyRouter(
        made, holdings, _NoReservations(), SystemClock(), Turn(random), max_prefill_candidates=1, retry_after_s=1.0
    )


class _NoReservations(Reservations):
    """The model's views tell a node's load as it is at that moment."""

    def reserve(self, incarnation: Incarnation, tokens: int, now_s: float) -> None:
        pass


def _mean_prompt_tokens(seed: int) -> float:
    sample: list[TraceRequest] = list(make_up(Random(f"load/{seed}"), SAMPLE, 1.0))
    return sum(request.prompt_tokens for request in sample) / len(sample)


def _choice_s(model: LoadModel, choices: int = 20) -> float:
    """What one choice costs where the router is given every node."""
    everybody: list[LoadNode] = [*model.prefill, *model.decode]
    views = [node.view(0.0, model.timing) for node in everybody]
    router = make_router("kv_aware", Holdings(INDEX_BYTES, Counters()), model.timing, 0)
    began_s = time.perf_counter()
    for _ in range(choices):
        router.choose(RequestFacts(MODEL, 1), views)
    return (time.perf_counter() - began_s) / choices


def _table(nodes: int, rate_per_s: float | None, result: LoadResult) -> Table:
    table = Table(title=f"{len(result.ttft_s)} requests on {nodes} nodes")
    for column in ("what", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("time to first token, ms", *_spread(result.ttft_s))
    parts = result.parts
    table.add_row("  for a slot", *_spread(parts.queued_s))
    table.add_row("  for its turn on a node", *_spread(parts.waited_s))
    table.add_row("  computed", *_spread(parts.computed_s))
    table.add_row("transfer behind it, ms", *_spread(parts.transfer_s))
    table.add_row("inter-token latency, ms", *_spread(result.inter_token_s))
    good_share = result.good / max(1, len(result.ttft_s) + result.shed)
    virtual_s = max(result.virtual_s, 1e-9)
    rows = {
        "offered load": "the trace's" if rate_per_s is None else f"{rate_per_s:.0f} requests/s",
        "goodput": f"{result.good / virtual_s:.0f} requests/s ({100 * good_share:.1f} %)",
        "output": f"{sum(result.output_tokens) / virtual_s:.0f} tokens/s",
        "reuse": f"{100 * result.reused_tokens / max(1, result.prompt_tokens):.1f} % of prompt tokens",
        "computed on decode nodes": str(result.in_place),
        "shed": str(result.shed),
        "most in flight": str(result.most_in_flight),
        "virtual time": f"{result.virtual_s:.0f} s",
        "wall time": f"{result.wall_s:.1f} s, {result.routing_s:.1f} s of it in the router",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    return table


def _spread(values_s: list[float]) -> tuple[str, ...]:
    if not values_s:
        return ("-",) * 4
    ms = 1e3 * np.array(values_s)
    return tuple(f"{value:.1f}" for value in (ms.mean(), *np.percentile(ms, (50, 90, 99))))
