"""The parts of a chat body that shape its answer: tools, which of them to call, a response format, thinking."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

MAX_TOOL_NAME_CHARS = 1024
MAX_TOOLS = 512
MAX_INT64 = 2**63 - 1

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Tolerant(BaseModel):
    """Keys that are not listed are tolerated."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FunctionDefinition(Tolerant):
    name: Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS, pattern=r"^[A-Za-z0-9_-]+$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict, description="A JSON schema; null means none.")
    strict: bool | None = Field(None, description="The schema must be enforceable as it stands.")

    @field_validator("parameters", mode="before")
    @classmethod
    def _null_is_none(cls, parameters: Any) -> Any:
        return {} if parameters is None else parameters


class ToolDefinition(Tolerant):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Tolerant):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchemaFormat | None = None
    grammar: str | None = Field(None, description="In Lark's notation, or the EBNF of llama.cpp.")
    regex: str | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _type_is_supported(cls, kind: Any) -> Any:
        known = ("text", "json_object", "json_schema", "grammar", "regex")
        if isinstance(kind, str) and kind not in known:
            context = {"type": kind[:80], "known": ", ".join(known)}
            raise PydanticCustomError("unsupported", "the type {type} is not supported; supported: {known}", context)
        return kind


class FunctionCall(Tolerant):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Tolerant):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ReasoningOptions(Strict):
    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = Field(
        None, description="Tokens of thinking after which its end is forced."
    )
    exclude: bool = False


class ThinkingOptions(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
