"""One sequence from the generator's tokens to the text that a client may see.

Text is released as soon as it is certain: whole characters only, never a stop string nor what follows one, never the
token that ended the sequence. Log probabilities come with the output that their token came in, whether its text is
certain or not. When the last choice of a job has ended the generator's context is left before that last piece is given
out, which stops the work on the node.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from orchestrator.api.logprobs import TokenLogprob, entries_of
from orchestrator.api.reading import AnswerReader, Read, Reading
from orchestrator.ports import GenerationJob, Generator
from pipelines.text.detokenizer import IncrementalDetokenizer
from pipelines.text.stop_strings import StopStringScanner
from pipelines.text.tokenizer import TextTokenizer
from pipelines.text.tool_parsers.tool_parser import NewId, ToolCallDelta
from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.status import GenerationStatus
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.errors import InternalError, Unavailable

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice, "" where no more is certain yet. The last piece of a choice has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    """In place of text, where it was asked for."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Telling:
    """What is told of a choice beside what its tokens say."""

    logprobs: bool = False
    echo: str = ""
    """The prompt's text, to lead the choice's."""
    echoed_token: int | None = None
    """The prompt's first token, where its log probabilities are to be told too: the first of them has none."""
    prompt_only: bool = False
    detokenize: bool = True
    reading: Reading | None = None
    """None: all text is content."""


PLAIN = Telling()


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ChoiceText:
    """Pure: outputs in, pieces out; counts what `usage` tells."""

    def __init__(
        self,
        index: int,
        tokenizer: TextTokenizer,
        stops: Sequence[str],
        end_ids: frozenset[int],
        telling: Telling = PLAIN,
        new_id: NewId = new_call_id,
    ) -> None:
        self._index = index
        self._telling = telling
        self._leading = telling.echo
        self._leading_logprobs: list[TokenLogprob] = []
        self.ended = False
        reading = telling.reading
        self._reader = None if reading is None else AnswerReader(reading, new_id)
        shown = frozenset() if reading is None else tokenizer.special_ids_of(reading.marks)
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._scanner = StopStringScanner(stops)
        self._end_ids = end_ids
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0

    def note_prompt(self, log_probabilities: LogProbabilities) -> None:
        """Of the prompt's tokens from the second on; they are told with the next output."""
        if self._telling.echoed_token is not None:
            self._leading_logprobs = [
                TokenLogprob(self._telling.echoed_token, None, ()),
                *entries_of([log_probabilities]),
            ]

    def accept(self, output: TextGenerationOutput) -> Piece:
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        visible = [] if self._telling.prompt_only else self._visible(output)
        if not self._telling.prompt_only:
            self.completion_tokens += len(output.tokens)
        logprobs = tuple(self._leading_logprobs)
        if self._telling.logprobs:
            logprobs += tuple(islice(entries_of(output.log_probabilities or ()), len(visible)))
        leading, self._leading, self._leading_logprobs = self._leading, "", []
        piece = self._piece(output, visible, logprobs)
        self.ended = piece.finish_reason is not None
        return piece if not leading else replace(piece, text=leading + piece.text)

    def _piece(self, output: TextGenerationOutput, visible: list[int], logprobs: tuple[TokenLogprob, ...]) -> Piece:
        if not self._telling.detokenize:
            ended = _finish_reason(output.final_status) if output.is_done else None
            return Piece(self._index, "", ended, logprobs, tuple(visible))
        if self._reader is not None:
            return self._read(self._reader, output, visible, logprobs)
        text = self._scanner.push(self._detokenizer.push(visible))
        if output.is_done and not self._stopped():
            text += self._scanner.push(self._detokenizer.finish())
        if self._stopped():
            return Piece(self._index, text, "stop", logprobs)
        if not output.is_done:
            return Piece(self._index, text, None, logprobs)
        reason: FinishReason = "length" if self._telling.prompt_only else _finish_reason(output.final_status)
        return Piece(self._index, text + self._scanner.finish(), reason, logprobs)

    def _read(
        self,
        reader: AnswerReader,
        output: TextGenerationOutput,
        visible: list[int],
        logprobs: tuple[TokenLogprob, ...],
    ) -> Piece:
        """Token by token, since it counts which of them are thinking; the end token counts as what it ends."""
        reads: list[Read] = []
        for token in visible:
            before = reader.thinking
            reads.append(reader.push(self._scanner.push(self._detokenizer.push([token]))))
            self.reasoning_tokens += before or reader.thinking
        if reader.thinking:
            self.reasoning_tokens += len(output.tokens) - len(visible)
        ended: FinishReason | None = None
        if self._stopped():
            ended = "stop"
        elif output.is_done:
            rest = self._scanner.push(self._detokenizer.finish())
            reads.append(reader.push(rest if self._stopped() else rest + self._scanner.finish()))
            ended = "stop" if self._stopped() else _finish_reason(output.final_status)
        if ended is not None:
            reads.append(reader.finish())
            if ended == "stop" and reader.has_calls:
                ended = "tool_calls"
        read = Read.merged(reads)
        return Piece(self._index, read.content, ended, logprobs, (), read.reasoning, read.calls)

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


async def pieces(generator: Generator, job: GenerationJob, texts: Sequence[ChoiceText]) -> AsyncGenerator[Piece, None]:
    """The pieces of a job's choices; the last one of each, and no other, has a finish reason. Close it to cancel the
    work. A choice that ends by its text alone is over, though its node learns of it only with the last one."""
    last: Piece | None = None
    async with generator.generate(job) as outputs:
        async for output in outputs:
            if output.prompt_log_probabilities is not None:
                for text in texts:
                    text.note_prompt(output.prompt_log_probabilities)
            if texts[output.choice].ended:
                continue
            piece = texts[output.choice].accept(output)
            if all(text.ended for text in texts):
                last = piece
                break
            yield piece
    if last is None:
        raise InternalError("the generation ended without its last word")
    yield last
