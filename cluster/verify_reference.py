"""One process that computes whole requests by itself, against which the cluster is held: the decode node's own engine
as a thread, prefill and decode in one place, no cache and no transfer.
"""

import msgspec
import numpy as np

from cluster.verify_outcome import Choice, Outcome, new_outcome
from decode_nodes.engine import build
from kvcache.memory import BlockMemory
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.messages import Admit, EngineReady, Failed, TokenDelta
from pipelines.runtime.thread import ThreadEngine
from pipelines.types.sampling import SamplingParams
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pipelines.types.token_buffer import TokenBuffer
from pronghorn.errors import from_record
from pronghorn.ids import Fence, new_incarnation

NO_SEED = bytes(32)
"""Nothing is cached here, so nobody compares hashes."""
BUDGET_S = 120.0
STOP_GRACE_S = 10.0


class OneProcess:
    def __init__(self, config: EngineConfig) -> None:
        self._config = msgspec.structs.replace(config, enable_prefix_caching=False, data_parallel=1)
        memory = BlockMemory.create(self._config.total_blocks, layout_of(config).block_bytes)
        self._engine = ThreadEngine(build, self._config, NO_SEED, memory, name="reference", checked=False)

    async def start(self) -> EngineReady:
        return await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop(STOP_GRACE_S)

    async def answer(self, prompt: tuple[int, ...], num_tokens: int) -> Choice:
        """Greedy. Raises the engine's error."""
        context = greedy_context(prompt, num_tokens, self._config.model_name, log_probabilities=2)
        return (await self.run(context)).choices[0]

    async def run(self, context: TextContext) -> Outcome:
        """What becomes of `context`, which is taken over. Raises the engine's error."""
        fence = Fence(context.request_id, 1, new_incarnation())
        self._engine.send(Admit(fence, context, BUDGET_S, prefill_here=True))
        outcome = new_outcome(context.num_choices)
        while not outcome.is_done:
            report = await self._engine.receive()
            for event in report.events:
                if isinstance(event, Failed) and event.fence == fence:
                    raise from_record(event.error)
                if isinstance(event, TokenDelta) and event.fence == fence:
                    outcome.take(
                        TextGenerationOutput(
                            request_id=fence.request_id,
                            tokens=event.tokens,
                            final_status=event.status,
                            log_probabilities=event.log_probabilities,
                            choice=event.choice,
                            prompt_log_probabilities=event.prompt_log_probabilities,
                        )
                    )
        return outcome


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
