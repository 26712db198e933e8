"""`POST /v1/completions`: `n` choices of each prompt, those of one prompt after another."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.chunks import CompletionChunks
from orchestrator.api.documents import answers, request_body
from orchestrator.api.logprobs import completion_logprobs
from orchestrator.api.schema import Completion, CompletionChoice, CompletionRequest
from orchestrator.api.services import Services


def completion_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=request_body(CompletionRequest), responses=answers(Completion))
    async def create_completion(request: Request) -> Response:
        prepared = await services.prepare(request, lambda model, body, at: model.preparer.completion(body, at))
        served = services.model_of(prepared)
        bytes_of = served.tokenizer.token_bytes
        created, model = int(time.time()), served.settings.model_name
        if prepared.stream:
            chunks = CompletionChunks(
                prepared.answer_id, created, model, prepared.include_usage, prepared.logprobs, bytes_of
            )
            return services.stream(prepared, chunks)
        whole, usage = await services.answers(request, prepared)
        choices = [
            CompletionChoice(
                index=i,
                text=a.text,
                logprobs=None
                if prepared.logprobs is None
                else completion_logprobs(a.logprobs, prepared.logprobs, bytes_of, offset=0)[0],
                finish_reason=a.finish_reason,
                token_ids=None if prepared.detokenize else a.token_ids,
            )
            for i, a in enumerate(whole)
        ]
        body = Completion(id=prepared.answer_id, created=created, model=model, choices=choices, usage=usage)
        return Response(body.model_dump_json(), media_type="application/json")

    return router
