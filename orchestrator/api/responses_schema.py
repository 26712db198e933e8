"""The body of `/v1/responses` and the shape of its answer, for text: what OpenAI's own schema has of it.

Stateless: nothing is kept between requests, so fields that name something kept are refused. Beside OpenAI's fields a
body may have the extensions of the other endpoints.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.api.media import refused_part
from orchestrator.api.schema import MAX_INT64, MAX_TOP_LOGPROBS, GenerationBody, NoEffect, StrictBody
from orchestrator.api.structure_schema import MAX_TOOLS, Effort, FunctionDefinition, Tolerant

MAX_ITEMS = 65_536
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class InputPart(Tolerant):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""


def _checked_parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise refused_part(index, part, ", ".join(_TEXT_PARTS))
    return content


class InputMessage(Tolerant):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]

    _parts = field_validator("content", mode="before")(_checked_parts)


class InputCall(Tolerant):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str = "{}"


class InputCallOutput(Tolerant):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[InputPart]

    _parts = field_validator("output", mode="before")(_checked_parts)


class ReasoningText(Tolerant):
    text: str


class InputReasoning(Tolerant):
    """Of an answer before. Its summary counts where it has no content."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] = Field(default_factory=list)


InputItem = Annotated[InputMessage | InputCall | InputCallOutput | InputReasoning, Field(discriminator="type")]
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


class NamedTool(StrictBody):
    type: Literal["function"]
    name: str


class TextFormat(Tolerant):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ThinkingAsked(StrictBody):
    effort: Effort | None = None
    summary: NoEffect = None
    generate_summary: NoEffect = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(GenerationBody):
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), Tag("items")],
        Discriminator(lambda given: "text" if isinstance(given, str) else "items"),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ThinkingAsked | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items_are_known(cls, given: Any) -> Any:
        if isinstance(given, str):
            if not given:
                raise PydanticCustomError("input", "must have at least one character")
            return given
        if not isinstance(given, list):
            raise PydanticCustomError("input", "must be a string or a list of items")
        return [_item(index, item) for index, item in enumerate(given)]


def _item(index: int, item: Any) -> Any:
    """With its type, which a message may leave out."""
    if not isinstance(item, dict):
        raise PydanticCustomError("input", "item {index} must be an object", {"index": index})
    kind = item.get("type")
    if kind is None and "role" in item:
        return item | {"type": "message"}
    if kind not in ITEM_TYPES:
        context = {"index": index, "type": str(kind)[:80], "known": ", ".join(ITEM_TYPES)}
        raise PydanticCustomError(
            "unsupported", "item {index} has type {type}, which is not supported; supported: {known}", context
        )
    return item


RESPONSES_NOT_YET: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "detokenize": (True,),
    "max_tokens": (),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
}
"""Fields that are known and not supported here, with the values that ask for nothing."""


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    """One of OpenAI's. The `error` event has ours."""
    message: str


class ResponseBody(BaseModel):
    """`output`: items of the types message, reasoning and function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] = Field(default_factory=dict)
    store: Literal[False] = False
    temperature: float | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
