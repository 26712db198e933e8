"""What the cluster adds to its engine: `python -m bench.serve [--quick] [--url URL]`.

Streams of random 64-token prompts, one at a time, turn about: once from a bare engine process (the decode node's own
child process, prefilling for itself), once through HTTP from a running prefill/decode cluster on the same machine.
The cluster stands idle while the bare engine runs, so that both pay for whatever idles beside them. Prints a table and
one line of JSON; judges nothing. Without `--url` it starts a cluster of one prefill and one decode node, and ends it.
"""

import argparse
import asyncio
import http.client
import json
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np

from cluster import config
from cluster.config import ServiceConfig
from cluster.model import find
from kvcache.layout import KVLayout
from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.messages import Admit, Failed, TokenDelta
from pipelines.runtime.process import ProcessEngine
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.ids import Fence, RequestID, new_incarnation

CLUSTER_NAME = "bench-serve"
PROMPT_TOKENS = 64
VOCABULARY = 40_000
WARM_UP_ROUNDS = 2


class Timing(msgspec.Struct, frozen=True):
    ttft_ms: float
    token_ms: float
    """Mean time between the tokens after the first."""


def timing(started_s: float, token_times_s: list[float]) -> Timing:
    gaps = len(token_times_s) - 1
    return Timing(
        ttft_ms=1e3 * (token_times_s[0] - started_s),
        token_ms=1e3 * (token_times_s[-1] - token_times_s[0]) / gaps,
    )


# --- the bare engine -------------------------------------------------------------------------------------------------


async def engine_stream(engine: ProcessEngine, prompt: list[int], output_tokens: int, vocab_size: int) -> Timing:
    context = TextContext(
        request_id=RequestID(),
        max_length=len(prompt) + output_tokens,
        tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
        vocab_size=vocab_size,
        ignore_eos=True,
        sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
    )
    fence = Fence(context.request_id, 0, new_incarnation())
    times_s: list[float] = []
    started_s = time.perf_counter()
    engine.send(Admit(fence, context, budget_s=60.0, prefill_here=True))
    while True:
        for event in (await engine.receive()).events:
            match event:
                case TokenDelta():
                    times_s.extend([time.perf_counter()] * len(event.tokens))
                    if event.status.is_done:
                        return timing(started_s, times_s)
                case Failed():
                    sys.exit(f"the bare engine failed: {event.error.message}")


# --- the cluster -----------------------------------------------------------------------------------------------------


def cluster_stream(url: str, model: str, prompt: list[int], output_tokens: int) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=60)
    times_s: list[float] = []
    started_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the cluster answered {response.status}: {response.read(400)!r}")
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        if b'"error"' in line:
            sys.exit(f"the stream broke: {line!r}")
        times_s.append(time.perf_counter())
    connection.close()
    if len(times_s) < output_tokens // 2:
        sys.exit(f"{len(times_s)} events came for {output_tokens} tokens")
    return timing_of_events(started_s, times_s, output_tokens)


def timing_of_events(started_s: float, event_times_s: list[float], output_tokens: int) -> Timing:
    """Random tokens often end within a character, whose text waits for the next event: count tokens, not events."""
    return Timing(
        ttft_ms=1e3 * (event_times_s[0] - started_s),
        token_ms=1e3 * (event_times_s[-1] - event_times_s[0]) / (output_tokens - 1),
    )


@contextmanager
def running_cluster(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    pronghorn = [sys.executable, "-m", "cluster.cli"]
    subprocess.run([*pronghorn, "up", "--detach", "--name", CLUSTER_NAME, "--port", "0"], check=True, stdout=sys.stderr)
    try:
        status = subprocess.run(
            [*pronghorn, "status", "--name", CLUSTER_NAME, "--json"], check=True, capture_output=True
        )
        yield json.loads(status.stdout)["url"]
    finally:
        subprocess.run([*pronghorn, "down", "--name", CLUSTER_NAME], check=True, stdout=sys.stderr)


# --- the run ---------------------------------------------------------------------------------------------------------


def served_model(url: str) -> str:
    """The name of what the cluster serves."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=10)
    connection.request("GET", "/v1/models")
    name: str = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.close()
    return name


async def measure(url: str, model_path: Path, model: str, rounds: int, output_tokens: int) -> dict[str, list[Timing]]:
    service = ServiceConfig(
        model_path=str(model_path), model_name=model, redis_url="", key_prefix="bench", threads=config.usable_cores()
    )
    engine_config = msgspec.convert(config.engine(service), EngineConfig)
    layout: KVLayout = config.kv_layout(service)
    memory = BlockMemory.create(engine_config.total_blocks, layout.block_bytes)
    engine = ProcessEngine("decode_nodes.engine", engine_config, secrets.token_bytes(32), memory, name="bare")
    ready = await engine.start()
    rng = random.Random(0)
    found: dict[str, list[Timing]] = {"engine": [], "cluster": []}
    try:
        for _ in range(WARM_UP_ROUNDS + rounds):
            prompt = [rng.randrange(100, VOCABULARY) for _ in range(PROMPT_TOKENS)]
            found["engine"].append(await engine_stream(engine, prompt, output_tokens, ready.vocab_size))
            found["cluster"].append(await asyncio.to_thread(cluster_stream, url, model, prompt, output_tokens))
    finally:
        await engine.stop(5.0)
    return {who: timings[WARM_UP_ROUNDS:] for who, timings in found.items()}


def report(found: dict[str, list[Timing]]) -> None:
    print(f"{'':10} {'first token ms':>15} {'min':>8} {'max':>8} {'time per token ms':>19} {'min':>8} {'max':>8}")
    summary: dict[str, float] = {}
    for who, timings in found.items():
        first, token = [t.ttft_ms for t in timings], [t.token_ms for t in timings]
        summary |= {f"{who}_ttft_ms": statistics.median(first), f"{who}_token_ms": statistics.median(token)}
        print(
            f"{who:10} {statistics.median(first):15.1f} {min(first):8.1f} {max(first):8.1f} "
            f"{statistics.median(token):19.2f} {min(token):8.2f} {max(token):8.2f}"
        )
    summary["added_ttft_ms"] = summary["cluster_ttft_ms"] - summary["engine_ttft_ms"]
    summary["token_time_ratio"] = summary["cluster_token_ms"] / summary["engine_token_ms"]
    summary["rounds"] = len(found["engine"])
    print(
        f"the cluster adds {summary['added_ttft_ms']:.1f} ms to the first token "
        f"and {100 * (summary['token_time_ratio'] - 1):.1f} % to the time per token (medians)"
    )
    print(json.dumps({"bench": "serve", **{key: round(value, 3) for key, value in summary.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a cluster that runs already (default: one is started)")
    parser.add_argument("--model", help="the folder of the model that it serves (default: the default one)")
    parser.add_argument("--quick", action="store_true", help="15 rounds of 32 tokens instead of 40 of 64")
    options = parser.parse_args()
    rounds, output_tokens = (15, 32) if options.quick else (40, 64)
    with running_cluster(options.url) as url:
        folder = find(options.model, config.cache_dir(config.environment()) / "models", lambda _: None)
        report(asyncio.run(measure(url, folder, served_model(url), rounds, output_tokens)))


if __name__ == "__main__":
    main()
