"""The engine beside transformers' eager mode, in one process and in turns: `python -m bench.engine`.

No cluster. Ours is the real pipeline with a prefix cache and real contexts, everything that a step needs included;
transformers runs LlamaForCausalLM with sdpa attention and `logits_to_keep=1`. Both: float32, the same threads, the
same model, context 512, greedy. Every round measures each side once, so that a busy machine disturbs both; ratios are
those of the medians over all rounds. Prints a table and a JSON line; never fails on a figure.
"""

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kvcache.hashing import BlockHasher
from kvcache.memory import BlockMemory
from kvcache.prefix_cache import PrefixCache
from pipelines.models.fetch import default_model_folder
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.text_pipeline import TextGenerationPipeline, layout_of
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer

CONTEXT_TOKENS = 512
BATCH = 8
PAUSE_S = 0.05
"""Between the two sides: OpenMP's workers spin for a while after their last region."""
TARGETS = {"single_time_ratio": 0.75, "batch8_speedup": 1.8, "prefill_speedup": 2.0}


class Ours:
    def __init__(self, folder: Path, threads: int) -> None:
        self._config = EngineConfig(
            str(folder), "bench", num_blocks=2048, threads=threads, max_batch_input_tokens=CONTEXT_TOKENS
        )
        layout = layout_of(self._config)
        self._memory = BlockMemory.create(self._config.num_blocks, layout.block_bytes)
        hasher = BlockHasher("sha256", bytes(32), "bench", None, layout.fingerprint())
        self._cache = PrefixCache(self._config.num_blocks, hasher)
        self._root = hasher.root(None)
        self._pipeline = TextGenerationPipeline(self._config, self._memory, self._cache)
        self._pipeline.canary()
        self.vocab_size = self._pipeline.vocab_size

    def prefill(self, prompts: torch.Tensor) -> Callable[[], None]:
        """Compute each prompt in a step of its own; gives the decode step of them all."""
        contexts = [self._prefill_one(prompt) for prompt in prompts.numpy()]

        def step() -> None:
            for context in contexts:
                self._cache.reserve(context.request_id, len(context.tokens))
            self._pipeline.execute(TextGenerationInputs([contexts]))
            for context in contexts:
                self._cache.commit(context.request_id, context.tokens.all, context.tokens.processed_length)

        return step

    def _prefill_one(self, prompt: np.ndarray[Any, Any]) -> TextContext:
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
        context = TextContext(max_length=2 * CONTEXT_TOKENS, tokens=TokenBuffer(prompt), sampling_params=greedy)
        self._cache.claim(context.request_id, self._root)
        self._cache.reserve(context.request_id, len(context.tokens))
        self._pipeline.execute(TextGenerationInputs([[context]]))
        self._cache.commit(context.request_id, context.tokens.all, context.tokens.processed_length)
        return context


class Transformers:
    def __init__(self, folder: Path, cache: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._cache_kind = cache

    def prefill(self, prompts: torch.Tensor) -> Callable[[], None]:
        """Compute the prompts in one forward; gives the decode step of them all."""
        if self._cache_kind == "static":
            cache = StaticCache(config=self._model.config, max_cache_len=CONTEXT_TOKENS + 128)
        else:
            cache = DynamicCache(config=self._model.config)
        positions = itertools.count(CONTEXT_TOKENS)
        tokens = self._forward(prompts, torch.arange(CONTEXT_TOKENS), cache)

        def step() -> None:
            nonlocal tokens
            tokens = self._forward(tokens, torch.tensor([next(positions)]), cache)

        return step

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        out = self._model(
            input_ids=tokens, position_ids=positions[None], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        chosen: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return chosen


class Clock:
    """Wall and CPU milliseconds of single calls, by name and side."""

    def __init__(self) -> None:
        self.wall_ms: dict[tuple[str, str], list[float]] = {}
        self.cpu_ms: dict[tuple[str, str], list[float]] = {}

    def time(self, what: str, side: str, call: Callable[[], Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = call()
        self.cpu_ms.setdefault((what, side), []).append(1e3 * (time.process_time() - cpu_s))
        self.wall_ms.setdefault((what, side), []).append(1e3 * (time.perf_counter() - wall_s))
        return result

    def median_ms(self, what: str, side: str) -> float:
        return statistics.median(self.wall_ms[what, side])


def measure(sides: dict[str, Any], vocab_size: int, rounds: int, steps: int) -> Clock:
    clock = Clock()
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> torch.Tensor:
        return torch.randint(100, vocab_size - 100, (count, CONTEXT_TOKENS), generator=generator)

    shared = prompts(BATCH)
    batches = {name: side.prefill(shared) for name, side in sides.items()}
    for round_ in range(-1, rounds):
        if round_ == 0:
            clock = Clock()  # the first round warmed both sides
        prompt = prompts(1)  # fresh, so that nothing of it is cached
        for name, side in sides.items():
            _settle()
            single = clock.time("prefill 512", name, partial(side.prefill, prompt))
            _decode(clock, "decode, 1 stream", name, single, steps)
        for name, batch in batches.items():
            _settle()
            _decode(clock, f"decode, batch {BATCH}", name, batch, steps)
    return clock


def _decode(clock: Clock, what: str, side: str, step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        clock.time(what, side, step)


def _settle() -> None:
    time.sleep(PAUSE_S)


def report(clock: Clock, arguments: argparse.Namespace) -> None:
    print(f"{'':22}{'transformers':>14}{'ours':>10}{'ratio':>9}{'CPU ratio':>11}{'calls':>7}   wall ms, medians")
    phases = ("decode, 1 stream", f"decode, batch {BATCH}", "prefill 512")
    ratios = {}
    for what in phases:
        theirs, ours = clock.median_ms(what, "transformers"), clock.median_ms(what, "ours")
        cpu = statistics.median(clock.cpu_ms[what, "ours"]) / statistics.median(clock.cpu_ms[what, "transformers"])
        ratios[what] = ours / theirs
        calls = len(clock.wall_ms[what, "ours"])
        print(f"{what:22}{theirs:14.1f}{ours:10.1f}{ours / theirs:9.2f}{cpu:11.2f}{calls:7}")
    single, batch, prefill = (ratios[what] for what in phases)
    figures = {"single_time_ratio": single, "batch8_speedup": 1 / batch, "prefill_speedup": 1 / prefill}
    for name, value in figures.items():
        wanted = "at most" if name == "single_time_ratio" else "at least"
        print(f"{name}: {value:.2f} (wanted: {wanted} {TARGETS[name]})")
    medians = {f"{what} / {side}": round(clock.median_ms(what, side), 2) for what, side in clock.wall_ms}
    facts = {"threads": arguments.threads, "rounds": arguments.rounds, "cache": arguments.cache}
    print(json.dumps({**{k: round(v, 3) for k, v in figures.items()}, "median_ms": medians, **facts}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; the default model where not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decode steps a round")
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static", help="transformers' KV cache")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # transformers on its own arguments
    folder = arguments.model or default_model_folder(Path.home() / ".cache" / "pronghorn" / "models", print)
    ours = Ours(folder, arguments.threads)
    sides = {"transformers": Transformers(folder, arguments.cache), "ours": ours}
    report(measure(sides, ours.vocab_size, arguments.rounds, arguments.steps), arguments)


if __name__ == "__main__":
    main()
