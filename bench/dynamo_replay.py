"""Dynamo's mocker on a trace of `bench/routing_trace.py`: what its KV router finds again of the prompts.

Its replay runs on virtual time, as ours does, and is given the same: split of the nodes, cache of each in blocks of
`TRACE_BLOCK_TOKENS`, seconds for a prompt and for a step, link. A child process, which is told to log errors alone. Not
there where `ai-dynamo-runtime` is not installed.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cluster import config
from cluster.simulator.load_model import NodeTiming
from cluster.simulator.trace import TRACE_BLOCK_TOKENS, TraceRequest

LONGEST_TOKENS = 65_536


def installed() -> bool:
    return importlib.util.find_spec("dynamo") is not None


def replay(requests: Iterable[TraceRequest], prefill: int, decode: int, timing: NodeTiming) -> dict[str, float]:
    """Figures by name, as `routing_trace.told` has them."""
    with TemporaryDirectory() as folder:
        trace, profile = Path(folder, "trace.jsonl"), Path(folder, "profile.npz")
        trace.write_text("".join(_line(request) for request in requests))
        _write_profile(profile, timing)
        asked = {
            "trace": str(trace),
            "workers": [prefill, decode],
            "engines": [_engine(role, profile, timing) for role in ("prefill", "decode")],
        }
        said = subprocess.run(
            [sys.executable, "-m", "bench.dynamo_replay", json.dumps(asked)],
            env={**config.environment(), "DYN_LOG": "error"},
            capture_output=True,
            text=True,
        )
    if said.returncode:
        raise RuntimeError(f"Dynamo's replay ended with {said.returncode}: {said.stderr[-2000:]}")
    summary = json.loads(said.stdout)
    return {
        "ttft_p50_ms": summary["median_ttft_ms"],
        "ttft_p99_ms": summary["p99_ttft_ms"],
        "end_to_end_mean_s": summary["mean_e2e_latency_ms"] / 1e3,
        "reuse_percent": 100.0 * summary["prefix_cache_reused_ratio"],
    }


def _line(request: TraceRequest) -> str:
    """A block more than are full, which nobody shares, for the tokens behind them: it takes no prompt without."""
    said = {
        "timestamp": 1e3 * request.at_s,
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": [*request.hash_ids, (1 << 48) + int(1e6 * request.at_s)],
    }
    return json.dumps(said) + "\n"


def _write_profile(path: Path, timing: NodeTiming) -> None:
    """What a prompt and a step take; it goes between these points in straight lines."""
    tokens = np.array([1.0, float(LONGEST_TOKENS)])
    step_ms = 1e3 * timing.step_s(timing.max_batch // 2)
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=1e3 * (timing.hop_s + tokens / timing.prefill_tokens_per_s),
        decode_active_kv_tokens=np.array([0.0, 1e9]),
        decode_context_length=tokens,
        decode_itl=np.full((2, 2), step_ms),
    )


def _engine(role: str, profile: Path, timing: NodeTiming) -> dict[str, Any]:
    return {
        "engine": {
            "worker_type": role,
            "block_size": TRACE_BLOCK_TOKENS,
            "num_gpu_blocks": timing.cache_blocks,
            "max_num_seqs": timing.max_batch,
            "kv_transfer_bandwidth": timing.link_bytes_per_s / 1e9,
            "kv_transfer_bytes_per_token": timing.kv_bytes_per_token,
            "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(profile)}},
        }
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    core = importlib.import_module("dynamo._core")
    found = core.run_mocker_trace_replay(
        [asked["trace"]],
        prefill_engine_args=asked["engines"][0],
        decode_engine_args=asked["engines"][1],
        num_prefill_workers=asked["workers"][0],
        num_decode_workers=asked["workers"][1],
        router_mode="kv_router",
        trace_block_size=TRACE_BLOCK_TOKENS,
    )
    print(json.dumps(found.summary))


if __name__ == "__main__":
    main()
