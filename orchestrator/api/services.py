"""What the routes stand on, made once per application, and the two ways in which they answer."""

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request

from orchestrator.api.body import parse_object, read_body
from orchestrator.api.choice import ChoiceText, FinishReason, Piece, Telling, pieces
from orchestrator.api.chunks import Chunks
from orchestrator.api.endings import before, while_client_stays
from orchestrator.api.logprobs import TokenLogprob
from orchestrator.api.merge import merged
from orchestrator.api.preparation import Arrival, Prepared
from orchestrator.api.schema import CompletionTokensDetails, PromptTokensDetails, Usage
from orchestrator.api.served_models import ServedModel, ServedModels
from orchestrator.api.settings import ApiSettings
from orchestrator.api.sse import EventStream
from orchestrator.api.workshop import Workshop
from orchestrator.ports import ClusterView, Generator
from pipelines.text.tool_parsers.tool_parser import ToolCallDelta, whole_calls
from pronghorn.clock import Clock
from pronghorn.tasks import Owner

Made = TypeVar("Made")
Make: TypeAlias = Callable[[ServedModel, dict[str, Any], Arrival], Made]


@dataclass(frozen=True)
class Answer:
    """One whole choice."""

    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    token_ids: list[int]
    reasoning: str
    tool_calls: list[ToolCallDelta]
    """Each whole."""


@dataclass(frozen=True)
class Services:
    generator: Generator
    view: ClusterView
    models: ServedModels
    settings: ApiSettings
    """Of any model, for what all of them have in common."""
    clock: Clock
    owner: Owner
    workshop: Workshop

    async def prepare(self, request: Request, make: Make[Made]) -> Made:
        """Read the body and have the model that it means make of it what is asked, in the workshop. Raises what `make`
        raises, InvalidRequest, RequestTooLarge, DeadlineExceeded and Overloaded."""
        arrival = Arrival(uuid.uuid4().hex, request.url.path, request.headers, self.clock.now_s())
        request.state.request_id = arrival.request_id
        raw = await read_body(request, self.settings.max_request_bytes, self.settings.default_deadline_s)

        def made(raw: bytes, arrival: Arrival) -> Made:
            fields = parse_object(raw)
            return make(self.models.meant(fields), fields, arrival)

        return await self.workshop.prepare(made, raw, arrival)

    def model_of(self, prepared: Prepared) -> ServedModel:
        return self.models.named(prepared.jobs[0].model)

    async def answers(self, request: Request, prepared: Prepared) -> tuple[list[Answer], Usage]:
        """Generate every choice to its end. Raises as `pieces`."""
        parts, usage = await self.pieces(request, prepared)
        return [_whole(pieces) for pieces in parts], usage

    async def pieces(self, request: Request, prepared: Prepared) -> tuple[list[list[Piece]], Usage]:
        """Generate every choice to its end. Raises ClientGone, DeadlineExceeded, and what the generator raises."""
        texts = self._texts(prepared)
        parts: list[list[Piece]] = [[] for _ in texts]
        async with (
            while_client_stays(request.receive, self.owner, prepared.answer_id),
            before(prepared.deadline, self.clock),
            aclosing(self._pieces(prepared, texts)) as stream,
        ):
            async for piece in stream:
                parts[piece.index].append(piece)
        return parts, _usage(prepared, texts)

    def stream(self, prepared: Prepared, chunks: Chunks) -> EventStream:
        return EventStream(
            self._events(prepared, chunks),
            chunks,
            name=prepared.answer_id,
            deadline=prepared.deadline,
            clock=self.clock,
            owner=self.owner,
            heartbeat_s=self.settings.heartbeat_s,
            last_word_s=self.settings.last_word_s,
        )

    async def _events(self, prepared: Prepared, chunks: Chunks) -> AsyncGenerator[bytes, None]:
        texts = self._texts(prepared)
        async with aclosing(self._pieces(prepared, texts)) as stream:
            async for piece in stream:
                yield chunks.piece(piece)
        if prepared.include_usage:
            yield chunks.usage(_usage(prepared, texts))

    def _texts(self, prepared: Prepared) -> list[ChoiceText]:
        texts: list[ChoiceText] = []
        tokenizer = self.model_of(prepared).tokenizer
        for number, job in enumerate(prepared.jobs):
            telling = Telling(
                logprobs=prepared.logprobs is not None,
                echo=prepared.echoes[number] if prepared.echoes is not None else "",
                echoed_token=job.context.tokens[0] if job.context.log_probabilities_echo else None,
                prompt_only=prepared.prompt_only,
                detokenize=prepared.detokenize,
                reading=prepared.reading,
            )
            ends = frozenset(job.context.eos_tracker.eos_token_ids)
            for _ in range(prepared.num_choices):
                texts.append(ChoiceText(len(texts), tokenizer, prepared.stops, ends, telling))
        return texts

    def _pieces(self, prepared: Prepared, texts: Sequence[ChoiceText]) -> AsyncGenerator[Piece, None]:
        each = prepared.num_choices
        streams = [
            pieces(self.generator, job, texts[number * each : (number + 1) * each])
            for number, job in enumerate(prepared.jobs)
        ]
        return merged(streams, each)


def _whole(pieces: Sequence[Piece]) -> Answer:
    """All the pieces of one choice."""
    reason = pieces[-1].finish_reason
    assert reason is not None, "a choice ended without its last word"
    return Answer(
        text="".join(piece.text for piece in pieces),
        finish_reason=reason,
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        token_ids=[token for piece in pieces for token in piece.token_ids],
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=whole_calls(call for piece in pieces for call in piece.tool_calls),
    )


def _usage(prepared: Prepared, texts: Sequence[ChoiceText]) -> Usage:
    prompt = sum(job.context.original_prompt_length for job in prepared.jobs)
    completion = sum(text.completion_tokens for text in texts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(text.cached_tokens for text in texts)),
        completion_tokens_details=None
        if prepared.reading is None or prepared.reading.reasoning is None
        else CompletionTokensDetails(reasoning_tokens=sum(text.reasoning_tokens for text in texts)),
    )
