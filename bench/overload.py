"""Four times what a cluster can do, for minutes: `python -m bench.overload [--seconds 180] [--json FILE]`.

A cluster of one prefill and one decode node on this machine. First its capacity is measured by clients that always ask
again. Then four times as many requests a second as it could end are drawn, with random moments, some of them urgent:
first the urgent ones alone are sent at theirs, then all are, whatever becomes of those before. At last one client asks
one thing after another, and how long it takes until that is as fast as the urgent ones alone were is the way back.

    goodput     tokens a second of requests that were answered whole: of the prompt, counted with the first of the
                answer, and of the answer, each when it came
    first token of a request that was let in, from when it was sent

The urgent requests have the same lengths at the same moments alone and among the others, so that they meet each other
alike; and every prompt is new. This process asks and measures, none of the cluster's does; what it takes of the
processor is printed beside what they take.

The prefill engine has a core of its own, as in the field it has an accelerator of its own: else the processes that hear
of four times as many requests take from the one that computes. `--shared-cores` leaves that to the kernel.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import httpx
import numpy as np
import psutil

from cluster import config
from cluster.chaos.footprint import of_system
from cluster.chaos.growth import Life
from cluster.chaos.local_site import LocalSite
from cluster.chaos.own_cluster import started
from cluster.processes import words_of
from cluster.run_folder import RunFolder
from pronghorn.errors import Unavailable

NAME = "bench-overload"
SLOWEST = "prefill_nodes.engine"
"""The process that everything waits for."""
SHAPE = ("--prefill=1", "--decode=1", "--threads=1", "--disaggregation=always", "--kv-memory=512MiB")
SERVICE = ("--option=service.max_queue_wait_s=5", "--option=service.starts_per_node=4")
PROMPT_LOG, PROMPT_SPREAD, PROMPT_LIMITS = 4.6, 0.5, (8, 512)
"""Log-normal, in tokens: half have up to 100, one in a hundred 320 or more."""
NEW_LOG, NEW_SPREAD, NEW_LIMITS = 3.0, 0.3, (4, 64)
VOCABULARY = range(100, 40_000)
URGENT = -1
WARM_S, CAPACITY_S = 12.0, 40.0
CLIENTS = 16
"""Of the measure of capacity: more than its nodes have room for without a queue."""
AGAIN_S = 1.0
"""After which a client of that measure that was refused asks again: at once it would be a load of its own."""
TIMES = 4.0
WINDOW_S = 10.0
BACK_S = 30.0
LOOK_S = 2.0
GOODPUT, FIRST_TOKEN = 0.9, 1.3


@dataclass(frozen=True)
class Asked:
    prompt_tokens: int
    new_tokens: int
    urgent: bool = False


@dataclass
class Heard:
    asked: Asked
    sent_s: float
    status: int = 0
    times_s: list[float] = field(default_factory=list)
    """Of each piece of text."""
    whole: bool = False
    why: str = ""

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.sent_s


def lengths(rng: random.Random, urgent_share: float) -> Iterator[Asked]:
    def drawn(log: float, spread: float, limits: tuple[int, int]) -> int:
        return min(limits[1], max(limits[0], round(rng.lognormvariate(log, spread))))

    while True:
        prompt, new = drawn(PROMPT_LOG, PROMPT_SPREAD, PROMPT_LIMITS), drawn(NEW_LOG, NEW_SPREAD, NEW_LIMITS)
        yield Asked(prompt, new, rng.random() < urgent_share)


class Client:
    def __init__(self, http: aiohttp.ClientSession, model: str, seed: int) -> None:
        self._http = http
        self._model = model
        self._rng = random.Random(seed)

    async def ask(self, asked: Asked) -> Heard:
        body = {
            "model": self._model,
            "prompt": self._rng.choices(VOCABULARY, k=asked.prompt_tokens),
            "max_tokens": asked.new_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "priority": URGENT if asked.urgent else 0,
        }
        heard = Heard(asked, time.monotonic())
        try:
            async with self._http.post("/v1/completions", json=body) as response:
                heard.status = response.status
                if response.status != 200:
                    heard.why = str((await response.json())["error"]["code"])
                    return heard
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        if b'"error"' in line:
                            heard.why = json.loads(line[6:])["error"]["code"]
                            return heard
                        heard.times_s.append(time.monotonic())
                    heard.whole = heard.whole or line.startswith(b"data: [DONE]")
        except (aiohttp.ClientError, TimeoutError) as error:
            heard.why = repr(error)
        return heard


# --- the phases ------------------------------------------------------------------------------------------------------


async def closed(client: Client, asking: Iterator[Asked], clients: int, for_s: float) -> list[Heard]:
    """So many clients, each asking again as soon as it was answered."""
    heard: list[Heard] = []
    until_s = time.monotonic() + for_s

    async def one() -> None:
        while time.monotonic() < until_s:
            heard.append(await client.ask(next(asking)))
            if not heard[-1].whole:
                await asyncio.sleep(AGAIN_S)

    await asyncio.gather(*(one() for _ in range(clients)))
    return heard


def schedule(per_s: float, for_s: float, urgent_share: float, seed: int) -> list[tuple[float, Asked]]:
    """At random moments, so many a second: seconds from the beginning, and what is asked."""
    rng, asking, at_s = random.Random(seed), lengths(random.Random(seed + 1), urgent_share), 0.0
    found = []
    while (at_s := at_s + rng.expovariate(per_s)) < for_s:
        found.append((at_s, next(asking)))
    return found


async def offered(client: Client, scheduled: list[tuple[float, Asked]]) -> list[Heard]:
    """Each at its moment, whatever becomes of those before."""
    began_s = time.monotonic()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for at_s, asked in scheduled:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(group.create_task(client.ask(asked)))
    return [task.result() for task in tasks]


async def back(client: Client, asking: Iterator[Asked], from_s: float, normal_s: float) -> tuple[float | None, int]:
    """How long after `from_s` the first request was sent from which on all had their first token within `normal_s`."""
    probes = [heard async for heard in _one_by_one(client, asking, from_s + BACK_S)]
    late = [n for n, heard in enumerate(probes) if not heard.whole or heard.first_s > normal_s]
    good = probes[late[-1] + 1 :] if late else probes
    return (max(0.0, good[0].sent_s - from_s) if good else None), len(probes)


async def _one_by_one(client: Client, asking: Iterator[Asked], until_s: float) -> AsyncIterator[Heard]:
    while time.monotonic() < until_s:
        yield await client.ask(next(asking))


# --- what the cluster is on, and what it is meanwhile -----------------------------------------------------------------


@dataclass
class Watched:
    titles: dict[Life, str] = field(default_factory=dict)
    mib: dict[Life, list[tuple[float, float]]] = field(default_factory=dict)
    usable: list[tuple[float, float]] = field(default_factory=list)
    """Nodes that may be given work: a breaker that is not closed makes a node unusable."""
    waiting: list[tuple[float, float]] = field(default_factory=list)


def give_cores(site: LocalSite) -> bool:
    """One to the slowest process, the others to all others and to this one; False where there are not two."""
    first, *others = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if not others:
        return False
    for process in (*site.of_run(), psutil.Process()):
        with suppress(psutil.Error, ProcessLookupError):
            cores = [first] if SLOWEST in words_of(process) else others
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)
    return True


async def watch(site: LocalSite, watched: Watched) -> None:
    while True:
        now_s = time.monotonic()
        for life, title, amounts in await asyncio.to_thread(of_system, site):
            watched.titles[life] = title
            watched.mib.setdefault(life, []).append((now_s, amounts["MiB"]))
        with suppress(httpx.HTTPError, Unavailable):
            for _, address in await site.orchestrators():
                metrics = (await site.http.get(f"http://{address}/metrics")).text
                watched.usable.append((now_s, _gauge(metrics, "num_nodes_usable")))
                watched.waiting.append((now_s, _gauge(metrics, "num_requests_waiting")))
        await asyncio.sleep(LOOK_S)


def _gauge(metrics: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(f"pronghorn:{name}{{"))


# --- what it comes to ------------------------------------------------------------------------------------------------


def goodput(heard: list[Heard], from_s: float, until_s: float, window_s: float) -> list[float]:
    """Tokens a second in each window. A piece of text may be several tokens: each request's are spread over its own."""
    at_s, tokens = [], []
    for one in heard:
        if one.whole:
            at_s += [one.times_s[0], *one.times_s]
            tokens += [one.asked.prompt_tokens, *([one.asked.new_tokens / len(one.times_s)] * len(one.times_s))]
    edges = np.linspace(from_s, until_s, 1 + max(1, round((until_s - from_s) / window_s)))
    return [float(n) for n in np.histogram(at_s, edges, weights=tokens)[0] / np.diff(edges)]


def stalled_s(heard: list[Heard], from_s: float, until_s: float) -> float:
    """The longest time in which nobody was told anything."""
    times = sorted(t for one in heard for t in one.times_s if from_s <= t <= until_s)
    return float(np.diff([from_s, *times, until_s]).max())


def quantiles(first_s: list[float]) -> dict[str, float]:
    return {"p50_s": float(np.percentile(first_s, 50)), "p99_s": float(np.percentile(first_s, 99)), "n": len(first_s)}


def memory(watched: Watched, from_s: float, until_s: float) -> list[dict[str, float | str]]:
    """Of every process that lived throughout: before, at most in each half, and at the end."""
    rows: list[dict[str, float | str]] = []
    half_s = (from_s + until_s) / 2
    for life, samples in watched.mib.items():
        before = [mib for at_s, mib in samples if at_s < from_s]
        first = [mib for at_s, mib in samples if from_s <= at_s < half_s]
        second = [mib for at_s, mib in samples if half_s <= at_s <= until_s]
        if before and first and second:
            mib = {"before": before[-1], "first_half": max(first), "second_half": max(second), "last": samples[-1][1]}
            rows.append({"process": watched.titles[life], "pid": life.pid, **mib})
    return sorted(rows, key=lambda row: float(row["first_half"]) - float(row["second_half"]))


def show(found: dict[str, object], windows: list[float], capacity: float, rows: list[dict[str, float | str]]) -> None:
    print("goodput of capacity, each 10 s: " + " ".join(f"{each / capacity:.2f}" for each in windows))
    print(f"{'process':60} {'pid':>7} {'MiB before':>10} {'1st half':>9} {'2nd half':>9} {'after':>7}")
    for row in rows:
        mib = [float(row[key]) for key in ("before", "first_half", "second_half", "last")]
        print(f"{row['process']:60} {row['pid']:7} {mib[0]:10.0f} {mib[1]:9.0f} {mib[2]:9.0f} {mib[3]:7.0f}")
    for key, value in found.items():
        print(f"{key:32} {value}")
    print(json.dumps({"bench": "overload", **found}))


async def measure(site: LocalSite, seconds: float, urgent_share: float, seed: int, shared_cores: bool) -> None:
    cores, own, watched = config.usable_cores(), psutil.Process(), Watched()
    apart = not shared_cores and give_cores(site)
    status = await site.status()
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(site.url, connector=connections, timeout=timeout, trust_env=False) as http:
        client = Client(http, status.model, seed)
        looking = asyncio.create_task(watch(site, watched))
        await closed(client, lengths(random.Random(seed), 0.0), CLIENTS, WARM_S)
        began_s = time.monotonic()
        full = await closed(client, lengths(random.Random(seed + 1), 0.0), CLIENTS, CAPACITY_S)
        [capacity] = goodput(full, began_s, began_s + CAPACITY_S, CAPACITY_S)
        per_s = sum(began_s <= h.times_s[-1] < began_s + CAPACITY_S for h in full if h.whole) / CAPACITY_S

        if not per_s:
            sys.exit(f"nothing was answered: {dict(Counter(f'{h.status} {h.why}' for h in full))}")
        scheduled = schedule(TIMES * per_s, seconds, urgent_share, seed + 2)
        of_urgent = [each for each in scheduled if each[1].urgent]
        print(f"capacity {capacity:.1f} tokens/s, {per_s:.2f} requests/s; {len(of_urgent)} urgent", file=sys.stderr)
        if not of_urgent:
            sys.exit(f"none of {len(scheduled)} requests is urgent: ask for more seconds, or a larger --urgent")
        alone = await offered(client, of_urgent)

        from_s, used_s = time.monotonic(), sum(own.cpu_times()[:2])
        cluster_s = _cpu_s(site)
        over = await offered(client, scheduled)
        to_s = from_s + seconds
        drained_s = time.monotonic() - to_s
        share = (sum(own.cpu_times()[:2]) - used_s) / (time.monotonic() - from_s)
        cluster_share = (_cpu_s(site) - cluster_s) / (time.monotonic() - from_s)

        first_alone = quantiles([h.first_s for h in alone if h.whole])
        normal_s = FIRST_TOKEN * first_alone["p99_s"]
        back_s, probes = await back(client, lengths(random.Random(seed + 4), 0.0), time.monotonic(), normal_s)
        await asyncio.sleep(LOOK_S)
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking

    windows = goodput(over, from_s, to_s, WINDOW_S)
    urgent = [h for h in over if h.asked.urgent]
    first_urgent = quantiles([h.first_s for h in urgent if h.whole])
    others = [h.first_s for h in over if h.whole and not h.asked.urgent]
    refused = Counter(f"{h.status} {h.why}" for h in over if not h.whole)
    usable = [n for at_s, n in watched.usable if at_s >= from_s]
    found: dict[str, object] = {
        "capacity_tokens_per_s": round(capacity, 2),
        "capacity_requests_per_s": round(per_s, 3),
        "offered_requests_per_s": round(len(over) / seconds, 2),
        "goodput_least": round(min(windows) / capacity, 3),
        "goodput_mean": round(float(np.mean(windows)) / capacity, 3),
        "goodput_windows_below": sum(each < GOODPUT * capacity for each in windows),
        "longest_silence_s": round(stalled_s(over, from_s + WINDOW_S, to_s), 2),
        "urgent_alone": first_alone,
        "urgent_overloaded": first_urgent,
        "urgent_ratio_p99": round(first_urgent["p99_s"] / first_alone["p99_s"], 3),
        "urgent_ratio_p50": round(first_urgent["p50_s"] / first_alone["p50_s"], 3),
        "urgent_refused": sum(not h.whole for h in urgent),
        "others_overloaded": quantiles(others),
        "not_answered": dict(refused),
        "most_waiting": max((n for at_s, n in watched.waiting if at_s >= from_s), default=None),
        "nodes_usable_least_and_last": (min(usable), usable[-1]) if usable else None,
        "drained_s": round(drained_s, 2),
        "normal_again_s": back_s,
        "probes": probes,
        "cores_of_this_process": round(share, 3),
        "cores_of_the_cluster": round(cluster_share, 3),
        "cores": cores,
        "prefill_engine_has_its_own": apart,
    }
    show(found, windows, capacity, memory(watched, from_s, to_s))


def _cpu_s(site: LocalSite) -> float:
    used_s = 0.0
    for process in site.of_run():
        with suppress(psutil.Error):
            used_s += sum(process.cpu_times()[:2])
    return used_s


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="of overload (default: 180)")
    parser.add_argument("--urgent", type=float, default=0.03, help="share of urgent requests (default: 0.03)")
    parser.add_argument("--chunk-tokens", type=int, default=16, help="of the engines (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-cores", action="store_true", help="let all processes run on all cores")
    options = parser.parse_args()
    environ = config.environment()
    shape = (*SHAPE, *SERVICE, f"--chunk-tokens={options.chunk_tokens}")
    async with started(RunFolder(config.home(environ), NAME), partial(print, file=sys.stderr), shape, environ) as site:
        await measure(site, options.seconds, options.urgent, options.seed, options.shared_cores)


if __name__ == "__main__":
    asyncio.run(main())
