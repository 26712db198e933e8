"""A pipeline without a model, whose KV bytes give away every mistake about blocks.

The KV of the token at position i is a digest of tokens 0..i, and the next token is a number made of the last digest:
both are pure functions of the prefix. Every `execute` first reads the KV of all that the contexts of the batch claim to
have computed, through their block tables, and raises WrongBlock at the first byte that is not what that prefix makes:
a wrong, stale, torn or foreign block shows at its first read.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcache.memory import BlockMemory
from pipelines.runtime.request_failures import RequestFailures
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.pipeline import Pipeline
from pipelines.types.sampled_token import SampledToken
from pipelines.types.text_context import TextContext
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import PronghornError
from pronghorn.ids import RequestID

KV_BYTES = 16
"""Of one token."""
VOCAB_SIZE = 1000


class WrongBlock(AssertionError):
    """A block that is about to be read does not hold what its prefix makes."""


def canary_layout(block_tokens: int) -> dict[str, str]:
    return {"model": "canary", "block_tokens": str(block_tokens), "kv_bytes": str(KV_BYTES)}


def block_bytes(block_tokens: int) -> int:
    return block_tokens * KV_BYTES


def prefix_digests(tokens: Sequence[int]) -> Iterator[bytes]:
    """The KV of each token in turn."""
    digest = b""
    for token in tokens:
        digest = hashlib.blake2b(digest + int(token).to_bytes(8, "little"), digest_size=KV_BYTES).digest()
        yield digest


def next_token(tokens: Sequence[int]) -> int:
    """What follows `tokens`, in 0..VOCAB_SIZE-1."""
    *_, last = prefix_digests(tokens)
    return int.from_bytes(last[:4], "little") % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that the canary says after `prompt`, where nothing ends it before."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def first_token(prompt: Sequence[int], choice: int) -> int:
    """What choice `choice` of a request says first; from there on it goes by its own prefix."""
    return (next_token(prompt) + choice) % VOCAB_SIZE


def expected_block(tokens: Sequence[int], position: int, block_tokens: int) -> bytes:
    """The bytes at block `position` of `tokens`: shorter than a block where that block is not full."""
    digests = list(prefix_digests(tokens[: (position + 1) * block_tokens]))
    return b"".join(digests[position * block_tokens :])


def write_blocks(memory: BlockMemory, block_tokens: int, tokens: Sequence[int], blocks: dict[int, int]) -> None:
    """Play the part of a hand-over: `blocks` says which block id holds which position of `tokens`."""
    for position, block_id in blocks.items():
        data = expected_block(tokens, position, block_tokens)
        memory.block(block_id)[: len(data)] = data


class BlockTables(Protocol):
    def table(self, owner: RequestID) -> Sequence[int]: ...


class CanaryPipeline(Pipeline[TextGenerationInputs[TextContext], TextGenerationOutput]):
    """`step_s` and `token_s` make a step last; `fail_with` fails single requests; `break_with`, or a `break_on` token
    among those computed, the whole engine; `gate`, while it is cleared, holds the engine inside a step. It may touch
    `own_blocks` and no others. Padding contexts are computed without any expectation of what their blocks hold."""

    def __init__(
        self,
        memory: BlockMemory,
        tables: BlockTables,
        block_tokens: int,
        *,
        max_batch_size: int = 32,
        step_s: float = 0.0,
        token_s: float = 0.0,
        break_on: int | None = None,
        own_blocks: range | None = None,
    ) -> None:
        assert memory.block_bytes == block_bytes(block_tokens)
        self._memory = memory
        self._tables = tables
        self._block_tokens = block_tokens
        self._max_batch_size = max_batch_size
        self._step_s = step_s
        self._token_s = token_s
        self._break_on = break_on
        self._own_blocks = range(memory.num_blocks) if own_blocks is None else own_blocks
        self.fail_with: dict[RequestID, PronghornError] = {}
        self.break_with: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.released: list[RequestID] = []
        self.computed_tokens = 0

    @property
    def max_batch_size(self) -> int:
        return self._max_batch_size

    def execute(self, inputs: TextGenerationInputs[TextContext]) -> dict[RequestID, TextGenerationOutput]:
        self.gate.wait()
        if self.break_with is not None:
            raise self.break_with
        if (pause_s := self._step_s + self._token_s * inputs.input_tokens) > 0:
            time.sleep(pause_s)
        contexts = inputs.flat_batch
        assert 0 < len(contexts) <= self._max_batch_size
        failures = {c.request_id: e for c in contexts if (e := self.fail_with.get(c.request_id)) is not None}
        outputs = {}
        for context in contexts:
            if context.request_id not in failures:
                self._compute(context)
                if (output := self._advance(context)) is not None:
                    outputs[context.request_id] = output
        if failures:
            raise RequestFailures(failures, outputs)
        return outputs

    def _compute(self, context: TextContext) -> None:
        """Check the KV of what is processed, write that of the active window."""
        if self._break_on is not None and self._break_on in context.tokens.active:
            raise ArithmeticError(f"token {self._break_on} breaks this canary")
        start, end = context.tokens.processed_length, context.tokens.current_position
        table = list(self._tables.table(context.request_id))
        assert len(set(table)) == len(table), f"request {context.request_id}: a block twice in its table {table}"
        assert all(block in self._own_blocks for block in table), f"{table} is not of this replica's {self._own_blocks}"
        if len(table) * self._block_tokens < end:
            raise WrongBlock(f"request {context.request_id}: {len(table)} blocks do not hold {end} tokens")
        for position, digest in enumerate(prefix_digests(context.tokens[:end].tolist())):
            index, offset = divmod(position, self._block_tokens)
            place = self._memory.block(table[index])[offset * KV_BYTES : (offset + 1) * KV_BYTES]
            if position >= start:
                place[:] = digest
            elif bytes(place) != digest and not context._is_padding_ctx:
                raise WrongBlock(
                    f"request {context.request_id}: block {table[index]} at position {index} does not hold token "
                    f"{position} of its prefix"
                )
        self.computed_tokens += 0 if context._is_padding_ctx else end - start

    def _advance(self, context: TextContext) -> TextGenerationOutput | None:
        if context.tokens.actively_chunked:
            context.update(0)
            return None
        token = next_token(context.tokens[:].tolist())
        log_probabilities = LogProbabilities([-1.0], [{token: -1.0}], [token]) if context.log_probabilities else None
        choices = context.num_choices if context.num_generated_tokens == 0 else 1
        context.update(token, log_probabilities)
        output = context.to_generation_output()
        output.siblings = [SampledToken((token + choice) % VOCAB_SIZE) for choice in range(1, choices)]
        return output

    def release(self, request_id: RequestID) -> None:
        self.released.append(request_id)
