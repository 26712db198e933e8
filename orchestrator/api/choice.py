"""One sequence from the generator's tokens to the text that a client may see.

Text is released as soon as it is certain: whole characters only, never a stop string nor what follows one, never the
token that ended the sequence. On a stop string the generator's context is left before the last piece is given out,
which stops the work on the node.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.ports import GenerationJob, Generator
from pipelines.text.detokenizer import IncrementalDetokenizer
from pipelines.text.stop_strings import StopStringScanner
from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import InternalError, Unavailable

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice, "" where no more is certain yet. The last piece of a choice has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None = None


class ChoiceText:
    """Pure: outputs in, pieces out; counts what `usage` tells."""

    def __init__(self, index: int, tokenizer: TextTokenizer, stops: Sequence[str], end_ids: frozenset[int]) -> None:
        self._index = index
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._scanner = StopStringScanner(stops)
        self._end_ids = end_ids
        self.completion_tokens = 0
        self.cached_tokens = 0

    def accept(self, output: TextGenerationOutput) -> Piece:
        self.completion_tokens += len(output.tokens)
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        text = self._scanner.push(self._detokenizer.push(self._visible(output)))
        if output.is_done and not self._stopped():
            text += self._scanner.push(self._detokenizer.finish())
        if self._stopped():
            return Piece(self._index, text, "stop")
        if not output.is_done:
            return Piece(self._index, text)
        return Piece(self._index, text + self._scanner.finish(), _finish_reason(output.final_status))

    def _stopped(self) -> bool:
        return self._scanner.matched is not None

    def _visible(self, output: TextGenerationOutput) -> list[int]:
        tokens = output.tokens
        if output.final_status is GenerationStatus.END_OF_SEQUENCE and tokens and tokens[-1] in self._end_ids:
            return tokens[:-1]
        return tokens


def _finish_reason(status: GenerationStatus) -> FinishReason:
    if status is GenerationStatus.CANCELLED:
        raise Unavailable("the generation was cancelled by the service")
    return "length" if status is GenerationStatus.MAXIMUM_LENGTH else "stop"


async def pieces(generator: Generator, job: GenerationJob, text: ChoiceText) -> AsyncGenerator[Piece, None]:
    """The pieces of one sequence; the last one, and no other, has a finish reason. Close it to cancel the work."""
    last: Piece | None = None
    async with generator.generate(job) as outputs:
        async for output in outputs:
            piece = text.accept(output)
            if piece.finish_reason is not None:
                last = piece
                break
            yield piece
    if last is None:
        raise InternalError("the generation ended without its last word")
    yield last
