"""`POST /v1/responses`: text, tools and structured output, with nothing kept between requests."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.documents import answers, request_body
from orchestrator.api.responses_output import AnswerItems, ResponseAnswer
from orchestrator.api.responses_schema import ResponseBody, ResponsesRequest
from orchestrator.api.services import Services


def responses_routes(services: Services) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=request_body(ResponsesRequest), responses=answers(ResponseBody))
    async def create_response(request: Request) -> Response:
        prepared = await services.prepare(request, lambda model, body, at: model.preparer.responses(body, at))
        served = services.model_of(prepared)
        bytes_of = served.tokenizer.token_bytes
        name = prepared.answer_id.removeprefix("resp_")
        items = AnswerItems(name, prepared.logprobs, bytes_of, prepared.reasoning_key is not None)
        model = served.settings.model_name
        answer = ResponseAnswer(prepared.answer_id, int(time.time()), model, prepared.repeated, items)
        if prepared.stream:
            return services.stream(prepared, answer)
        (pieces,), usage = await services.pieces(request, prepared)
        for piece in pieces:
            items.push(piece)
        return Response(answer.whole(usage).model_dump_json(), media_type="application/json")

    return router
