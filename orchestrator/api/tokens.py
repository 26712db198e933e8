"""`POST /tokenize` and `/detokenize`: what a served model's tokenizer makes of a prompt or a conversation, and back.

The tokens of a conversation are those that a chat of the same body would compute.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.api.body import check_fields
from orchestrator.api.documents import Responses, refusals, request_body
from orchestrator.api.logprobs import text_of
from orchestrator.api.schema import ChatMessage, StrictBody, TokenId
from orchestrator.api.served_models import ServedModel
from orchestrator.api.services import Services
from orchestrator.api.structure_schema import MAX_TOOLS, ToolDefinition
from pronghorn.errors import InvalidRequest

MAX_TOKENS = 4 * 1024 * 1024
"""In one `/detokenize` body."""


class TokenizeRequest(StrictBody):
    """Either `prompt` or `messages`."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "must have either prompt or messages")
        return self


class DetokenizeRequest(StrictBody):
    model: str = ""
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class TokenDesk:
    """Of one model. Pure; run in the workshop. Raises InvalidRequest, ModelNotFound."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._preparer = model.preparer
        self._max_length = model.settings.max_length

    def tokenize(self, fields: Mapping[str, Any]) -> Tokenized:
        body = check_fields(fields, TokenizeRequest, {})
        self._preparer.check_model(body.model)
        special = body.add_special_tokens
        if body.messages is None:
            tokens = self._tokenizer.encode(body.prompt or "", add_special_tokens=special is not False)
        else:
            options = {"add_generation_prompt": body.add_generation_prompt} | (body.chat_template_kwargs or {})
            text = self._preparer.conversation(body.messages, body.tools or [], options)
            tokens = self._tokenizer.encode(text, add_special_tokens=bool(special))
        strings = [text_of(self._tokenizer.token_bytes(token)) for token in tokens] if body.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=self._max_length, tokens=tokens, token_strs=strings)

    def detokenize(self, fields: Mapping[str, Any]) -> Detokenized:
        body = check_fields(fields, DetokenizeRequest, {})
        self._preparer.check_model(body.model)
        most = self._tokenizer.vocab_size - 1
        wrong = next((token for token in body.tokens if token > most), None)
        if wrong is not None:
            raise InvalidRequest(f"tokens has {wrong}; the model's ids are 0 to {most}", param="tokens")
        return Detokenized(prompt=self._tokenizer.decode(body.tokens, skip_special_tokens=False))


def token_routes(services: Services) -> APIRouter:
    router = APIRouter()
    wrong = refusals(400, 404, 413, 429, 504)
    tokenized: Responses = {200: {"model": Tokenized}}
    detokenized: Responses = {200: {"model": Detokenized}}

    @router.post("/tokenize", openapi_extra=request_body(TokenizeRequest), responses=tokenized | wrong)
    async def tokenize(request: Request) -> Response:
        return _json(await services.prepare(request, lambda model, body, _: TokenDesk(model).tokenize(body)))

    @router.post("/detokenize", openapi_extra=request_body(DetokenizeRequest), responses=detokenized | wrong)
    async def detokenize(request: Request) -> Response:
        return _json(await services.prepare(request, lambda model, body, _: TokenDesk(model).detokenize(body)))

    return router


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(exclude_none=True), media_type="application/json")
