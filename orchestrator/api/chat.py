"""`POST /v1/chat/completions`."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.chunks import ChatChunks
from orchestrator.api.documents import answers, request_body
from orchestrator.api.logprobs import chat_logprobs
from orchestrator.api.schema import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from orchestrator.api.services import Answer, Services


def chat_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", openapi_extra=request_body(ChatCompletionRequest), responses=answers(ChatCompletion)
    )
    async def create_chat_completion(request: Request) -> Response:
        prepared = await services.prepare(request, lambda model, body, at: model.preparer.chat(body, at))
        served = services.model_of(prepared)
        bytes_of = served.tokenizer.token_bytes
        created, model = int(time.time()), served.settings.model_name
        if prepared.stream:
            chunks = ChatChunks(
                prepared.answer_id,
                created,
                model,
                prepared.include_usage,
                prepared.logprobs,
                bytes_of,
                prepared.reasoning_key,
            )
            return services.stream(prepared, chunks)
        whole, usage = await services.answers(request, prepared)
        choices = [
            ChatChoice(
                index=i,
                message=_message(a, prepared.reasoning_key),
                logprobs=None if prepared.logprobs is None else chat_logprobs(a.logprobs, prepared.logprobs, bytes_of),
                finish_reason=a.finish_reason,
                token_ids=None if prepared.detokenize else a.token_ids,
            )
            for i, a in enumerate(whole)
        ]
        body = ChatCompletion(id=prepared.answer_id, created=created, model=model, choices=choices, usage=usage)
        return Response(body.model_dump_json(), media_type="application/json")

    return router


def _message(answer: Answer, reasoning_key: str | None) -> AnswerMessage:
    """Thinking without an answer is the answer."""
    content: str | None = answer.text
    reasoning: str | None = answer.reasoning or None
    calls = [
        AnswerToolCall(id=call.id or "", function=AnswerFunction(name=call.name or "", arguments=call.arguments))
        for call in answer.tool_calls
    ]
    if reasoning and not answer.text.strip() and not calls and answer.finish_reason == "stop":
        content, reasoning = reasoning, None
    if calls and not answer.text:
        content = None
    return AnswerMessage(
        content=content,
        reasoning=reasoning if reasoning_key == "reasoning" else None,
        reasoning_content=reasoning if reasoning_key == "reasoning_content" else None,
        tool_calls=calls or None,
    )
