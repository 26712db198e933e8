"""The text pipeline: one step of a batch, from the active windows of its contexts to their next tokens.

Decoding and prompts, whole or in chunks, mix freely in a batch: their tokens go through the products as one matrix and
only attention tells them apart. Knows block tables as lists of ids and never allocates a block; the scheduler reserves
them before the step. One thread calls it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.memory import BlockMemory
from kvcache.storage import paged_view
from pipelines.models.config import read_config
from pipelines.runtime.config import EngineConfig
from pipelines.runtime.constraints import Constraints
from pipelines.runtime.decoders import build_decoder
from pipelines.runtime.kv_layout import layout_of
from pipelines.runtime.logits_processors import load_processors
from pipelines.runtime.request_failures import RequestFailures
from pipelines.runtime.sampler import prompt_log_probabilities, sample
from pipelines.runtime.step import Step, build_step, sampled_rows
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.pipeline import Pipeline
from pipelines.types.sampled_token import SampledToken
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import InternalError, InvalidRequest, PronghornError
from pronghorn.ids import RequestID

__all__ = ["BlockTables", "TextGenerationPipeline", "layout_of"]


class BlockTables(Protocol):
    def table(self, owner: RequestID) -> Sequence[int]:
        """Block ids in position order, enough for the active window of a context in the batch."""


class TextGenerationPipeline(Pipeline[TextGenerationInputs[TextContext], TextGenerationOutput]):
    def __init__(self, config: EngineConfig, memory: BlockMemory, tables: BlockTables) -> None:
        """Opens and packs the weights, and sets torch's threads for the process. `memory` stays the caller's.

        Raises ConfigurationError where the model cannot be served as asked.
        """
        torch.set_num_threads(config.threads)
        folder = Path(config.model_path)
        model = read_config(folder)
        self.layout = layout_of(config)
        self.vocab_size = model.vocab_size
        self.max_length = min(config.max_length or model.max_positions, model.max_positions)
        self._config = config
        self._processors = load_processors(config.logits_processors)
        self._tables = tables
        self._constraints = Constraints(folder, model.vocab_size)
        self._pool = paged_view(memory, self.layout)
        self._decoder = build_decoder(model, config, self._pool, self.max_length)

    @property
    def max_batch_size(self) -> int:
        return self._config.max_batch_size

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        """Compute every active window, write its KV, sample and update the contexts whose window ends there.

        A chunk only advances, and has no output. Raises RequestFailures after the step where a request's logits were
        not finite (InternalError), a token of it is none of the model's (InvalidRequest), or its response format cannot
        be kept (either): those requests are named and not updated, the others went on as usual.
        """
        outputs: dict[RequestID, TextGenerationOutput] = {}
        failures: dict[RequestID, PronghornError] = {}
        contexts = []
        for context in inputs.flat_batch:
            if (error := self._refusal(context)) is None:
                contexts.append(context)
            else:
                failures[context.request_id] = error
        self._constraints.prepare(contexts)
        logits = self._logits(contexts)
        first = 0
        for context in contexts:
            count = len(sampled_rows(context))
            rows, first = logits[first : first + count], first + count
            try:
                if (output := self._advance(context, rows)) is not None:
                    outputs[context.request_id] = output
            except PronghornError as error:
                failures[context.request_id] = error
        if failures:
            raise RequestFailures(failures, outputs)
        return outputs

    def _advance(self, context: TextContext, rows: NDArray[np.float32]) -> TextGenerationOutput | None:
        """`rows` are the logits of `sampled_rows`. None behind a chunk. Raises InternalError and InvalidRequest; the
        context is as it was then."""
        if not np.isfinite(rows).all():
            raise InternalError("the model computed logits that are not finite")
        chunked = context.tokens.actively_chunked
        sampled = [] if chunked else self._sampled(context, rows[-1])
        if context.awaits_prompt_log_probabilities:
            self._note_prompt(context, rows if chunked else rows[:-1])
        if chunked:
            context.update(0)
            return None
        context.update(sampled[0].token, sampled[0].log_probabilities)
        output = context.to_generation_output()
        output.siblings = sampled[1:]
        return output

    def _sampled(self, context: TextContext, logits: NDArray[np.float32]) -> list[SampledToken]:
        return sample(context, logits, self._processors, self._constraints.gates(context))

    def _note_prompt(self, context: TextContext, rows: NDArray[np.float32]) -> None:
        """Row i of the window is what the model expects in the place behind it."""
        if len(rows) == 0:
            return
        first = context.tokens.processed_length + 1
        following = context.tokens[first : first + len(rows)]
        entries = prompt_log_probabilities(rows, following, context.log_probabilities)
        context.note_prompt_log_probabilities(entries)

    def _refusal(self, context: TextContext) -> InvalidRequest | None:
        """An id outside the vocabulary would read outside the embeddings, and take the whole batch with it."""
        for name in context.sampling_params.logits_processors or ():
            if name not in self._processors:
                known = ", ".join(self._processors) or "none"
                return InvalidRequest(
                    f"logits_processors has {name!r}; this engine has: {known}", param="logits_processors"
                )
        active = context.tokens.active
        if 0 <= active.min() and active.max() < self.vocab_size:
            return None
        wrong = next(int(token) for token in active if not 0 <= token < self.vocab_size)
        return InvalidRequest(f"token {wrong} is not in the vocabulary, 0 to {self.vocab_size - 1}", param="prompt")

    def _logits(self, contexts: Sequence[TextContext]) -> NDArray[np.float32]:
        """[rows that are sampled, of all contexts in order, vocab]"""
        if not contexts:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        tables = [self._tables.table(context.request_id) for context in contexts]
        return self._decoder.logits(build_step(contexts, tables, self._config.block_tokens))

    def release(self, request_id: RequestID) -> None:
        self._constraints.release(request_id)

    def canary(self) -> None:
        """Compute a prompt, a chunk behind a prefix and a decode step in blocks 0 and 1, so that everything is
        compiled and warm. Call before any block is in use. Raises InternalError where a logit is not finite."""
        block_tokens = self._config.block_tokens
        long = min(self.max_length, block_tokens * min(2, self._pool.shape[0]))
        for first, end in ((0, max(1, long - 2)), (max(0, long - 2), long), (long - 1, long)):
            if not np.isfinite(self._decoder.logits(_canary_step(first, end, block_tokens))).all():
                raise InternalError("the canary batch gave logits that are not finite")

    def close(self) -> None:
        """End the threads that compute. Idempotent."""
        self._constraints.close()
        self._decoder.close()


def _canary_step(first: int, end: int, block_tokens: int) -> Step:
    """One sequence, positions `first` to `end`, in the pool's first blocks."""
    positions = np.arange(first, end)
    return Step(
        token_ids=np.zeros(end - first, dtype=np.int64),
        positions=positions,
        slots=positions,
        starts=np.array([0, end - first]),
        contexts=np.array([end]),
        tables=np.arange(-(-end // block_tokens))[None],
        sample_rows=np.array([end - first - 1]),
    )
