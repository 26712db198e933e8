"""One process that computes whole requests by itself, against which the cluster is held: the decode node's own engine
as a thread, prefill and decode in one place, no cache and no transfer.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from decode_nodes.engine import build
from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.messages import Admit, EngineReady, Failed, TokenDelta
from pipelines.runtime.thread import ThreadEngine
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import from_record
from pronghorn.ids import Fence, new_incarnation

NO_SEED = bytes(32)
"""Nothing is cached here, so nobody compares hashes."""
BUDGET_S = 120.0
STOP_GRACE_S = 10.0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    gaps: list[float]
    """Per token, how far apart the two best logits lay (a difference of log probabilities is one of logits)."""


class OneProcess:
    def __init__(self, config: EngineConfig) -> None:
        self._config = msgspec.structs.replace(config, enable_prefix_caching=False, data_parallel=1)
        memory = BlockMemory.create(self._config.total_blocks, layout_of(config).block_bytes)
        self._engine = ThreadEngine(build, self._config, NO_SEED, memory, name="reference", checked=False)

    async def start(self) -> EngineReady:
        return await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop(STOP_GRACE_S)

    async def answer(self, prompt: tuple[int, ...], num_tokens: int) -> Answer:
        """Greedy. Raises the engine's error."""
        context = greedy_context(prompt, num_tokens, self._config.model_name, log_probabilities=2)
        fence = Fence(context.request_id, 1, new_incarnation())
        self._engine.send(Admit(fence, context, BUDGET_S, prefill_here=True))
        tokens: list[int] = []
        gaps: list[float] = []
        while True:
            report = await self._engine.receive()
            for event in report.events:
                if isinstance(event, Failed) and event.fence == fence:
                    raise from_record(event.error)
                if isinstance(event, TokenDelta) and event.fence == fence:
                    tokens += event.tokens
                    gaps += [_gap(entry) for entry in event.log_probabilities or []]
                    if event.status.is_done:
                        return Answer(tokens, gaps)


def greedy_context(prompt: tuple[int, ...], num_tokens: int, model: str, log_probabilities: int = 0) -> TextContext:
    """A request for exactly `num_tokens` tokens, the most likely ones; nothing ends it before."""
    return TextContext(
        max_length=len(prompt) + num_tokens,
        tokens=TokenBuffer(np.array(prompt, dtype=np.int64)),
        sampling_params=SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True),
        ignore_eos=True,
        model_name=model,
        log_probabilities=log_probabilities,
    )


def _gap(entry: LogProbabilities) -> float:
    """Of the entry's one position; infinite where the engine knows of no second."""
    best = sorted(entry.top_log_probabilities[0].values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
