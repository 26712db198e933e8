"""The bodies of `/v1/chat/completions` and `/v1/completions`: what may be sent, within which bounds, and what comes
back.

Types are strict: `"1"` is not a number and `true` is not 1. Fields that the server knows and does not support yet are
not here but in `CHAT_NOT_YET` and `COMPLETION_NOT_YET`; fields of OpenAI's own schema that need no action are here,
without a check. Streamed chunks have the same shapes as the answers and are written by `chunks.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.api.media import refused_part
from orchestrator.api.structure_schema import (
    MAX_TOOLS,
    Effort,
    NamedToolChoice,
    ReasoningOptions,
    ResponseFormat,
    ThinkingOptions,
    ToolCall,
    ToolDefinition,
)
from pipelines.types.sampling import LARGEST_BIAS

MAX_STOPS = 4
MAX_STOP_CHARS = 4096
MAX_STOP_TOKENS = 1024
"""Stops go with the request to its node, and are looked for in every piece of text."""
MAX_HINT_BYTES = 64 * 1024
"""As msgpack. A usable hint, of 64 instances at most, is far below it."""
MAX_SESSION_CHARS = 512
MAX_SALT_CHARS = 512
MAX_PRIORITY = 100
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_PROCESSORS = 16
MAX_INT64 = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT64)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Bias = Annotated[Number, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
NoEffect = Annotated[Any, Field(description="Accepted; changes nothing here.")]


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: NoEffect = None
    continuous_usage_stats: Annotated[Any, Field(description="Accepted; usage comes once, at the end.")] = None


class GenerationBody(StrictBody):
    """What both endpoints take."""

    model: str = Field("", description="The served model; empty means the one that is served.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="Choice i draws with the seed + i.")] = 1
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        None, description="By token id, written as a string."
    )
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOPS} strings, none empty.")
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None

    top_k: Annotated[int, Field(ge=-1, le=MAX_INT64, description="0 and -1: all tokens.")] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    ignore_eos: bool = False
    thinking_temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    logits_processors: Annotated[list[str], Field(max_length=MAX_PROCESSORS)] | None = Field(
        None, description="Names that the server's configuration knows."
    )
    detokenize: bool = Field(True, description="Without it a choice has `token_ids` and no text.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    timeout: Annotated[Number, Field(gt=0, description="Seconds for the whole request.")] | None = None
    target_endpoint: str | None = Field(None, description="A prefill node: registered name or `tcp://host:port`.")
    dkv_cache_hint: Any = Field(None, description="Who holds cached blocks: a JSON object. One of no use is ignored.")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None

    priority: Annotated[
        int,
        Field(
            ge=-MAX_PRIORITY,
            le=MAX_PRIORITY,
            description="The lower, the sooner, where requests wait. A server may forbid low numbers.",
        ),
    ] = 0

    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: (
        Annotated[
            str,
            Field(
                max_length=MAX_SESSION_CHARS,
                description="What requests of one conversation have in common: they are likely to go to the same node.",
            ),
        ]
        | None
    ) = None
    prompt_cache_retention: NoEffect = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_strings(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise PydanticCustomError("stop", "must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise PydanticCustomError("stop", "must have at most {most} strings", {"most": MAX_STOPS})
        if not all(stops):
            raise PydanticCustomError("stop", "must have strings of at least one character")
        if any(len(s) > MAX_STOP_CHARS for s in stops):
            raise PydanticCustomError(
                "stop", "must have strings of at most {most} characters", {"most": MAX_STOP_CHARS}
            )
        return stops

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Keys that are not listed (`name`, `refusal`, ...) are tolerated."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Calls that the assistant made in this turn.")
    tool_call_id: str | None = Field(None, description="Which call a turn of the role tool answers.")
    reasoning: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_text(cls, content: Any) -> Any:
        if not isinstance(content, (str, list)) and content is not None:
            raise PydanticCustomError("content", "must be a string or a list of parts")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise refused_part(index, part, "text")
            if not isinstance(part.get("text"), str):
                raise PydanticCustomError("content", "part {index} must have a text, a string", {"index": index})
        return content


class ChatCompletionRequest(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="Alternatives of each token; 1 where it is left out."
    )
    prompt_tokens: list[TokenId] | None = Field(None, description="The prompt as token ids; used instead of messages.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="auto where it is left out."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = Field(None, description="A variable of the chat template; none: do not think.")
    reasoning: ReasoningOptions | None = None
    reasoning_split: bool = Field(True, description="false: thinking stays in the content, between its marks.")
    thinking: ThinkingOptions | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


OPENAI_DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(GenerationBody):
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = OPENAI_DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = Field(None, description="Must be `n`: choices are not ranked.")
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_text_or_tokens(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of either")
        if not prompt:
            raise PydanticCustomError("prompt", "must not be empty")
        kinds = {type(item) for item in prompt}
        if len(kinds) != 1 or not kinds <= {str, int, list}:
            raise PydanticCustomError(
                "prompt", "must have items of one kind: strings, token ids, or lists of token ids"
            )
        return prompt

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


CHAT_NOT_YET: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
}
"""Fields that the server knows and does not support yet, with the values that ask for nothing."""

COMPLETION_NOT_YET: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


def _is_none(value: object) -> bool:
    return value is None


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[CompletionTokensDetails | None, Field(exclude_if=_is_none)] = None
    """Where the model's thinking is told apart."""


FinishReason = Literal["stop", "length", "tool_calls"]
TokenIds = Annotated[list[int] | None, Field(exclude_if=_is_none)]
"""What was generated, where `detokenize` is off."""


class AnswerFunction(BaseModel):
    name: str
    arguments: str
    """JSON text."""


class AnswerToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """None beside calls without words."""
    refusal: None = None
    reasoning: Annotated[str | None, Field(exclude_if=_is_none)] = None
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The same under another name, never both: the configuration says which."""
    tool_calls: Annotated[list[AnswerToolCall] | None, Field(exclude_if=_is_none)] = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason
    token_ids: TokenIds = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: FinishReason
    token_ids: TokenIds = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
