"""A request for text as it arrives: who asks, what with, how.

It stays in the process that received it; what crosses to a node is the `TextContext` made of it. Nothing here knows a
tokenizer, so a request that holds neither prompt nor messages is only refused where it is tokenised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NotRequired, Protocol, TypedDict, cast, runtime_checkable

from pydantic import BaseModel, ConfigDict, field_validator

from pipelines.types.invalid_value import InvalidValue
from pipelines.types.process_local import ProcessLocal
from pipelines.types.sampling import SamplingParams
from pronghorn.ids import RequestID as RequestID

DUMMY_REQUEST_ID = RequestID("cuda_graph_dummy")
"""Reserved for work that warms a device up."""


@runtime_checkable
class Request(Protocol):
    @property
    def request_id(self) -> RequestID: ...

    def __str__(self) -> str: ...


# --- content ---------------------------------------------------------------------------------------------------------


class TextContentPart(BaseModel):
    model_config = ConfigDict(frozen=True)

    type: Literal["text"] = "text"
    text: str


class ImageContentPart(BaseModel):
    """Stands where an image goes; the bytes are in the request's `images`. Hints may be ignored by a model."""

    model_config = ConfigDict(frozen=True)

    type: Literal["image"] = "image"
    detail: str | None = None
    max_long_side_pixel: int | None = None


class VideoContentPart(BaseModel):
    """Stands where a video goes; the bytes are in the request's `videos`. Hints may be ignored by a model."""

    model_config = ConfigDict(frozen=True)

    type: Literal["video"] = "video"
    fps: float | None = None
    max_frames: int | None = None
    detail: str | None = None
    max_long_side_pixel: int | None = None


MessageContent = TextContentPart | ImageContentPart | VideoContentPart


def _content_part(item: object) -> MessageContent:
    if isinstance(item, TextContentPart | ImageContentPart | VideoContentPart):
        return item
    if not isinstance(item, Mapping):
        raise ValueError(f"a content part is an object, not {type(item).__name__}")
    match item.get("type"):
        case None:
            raise ValueError("a content part needs a type")
        case "text":
            return TextContentPart(text=item.get("text") or item.get("content") or "")
        case "image":
            return ImageContentPart()
        case "video":
            return VideoContentPart()
        case ("image_url" | "video_url") as kind:
            media = f"{kind.removesuffix('_url')}s"
            raise ValueError(
                f"{kind} parts are not taken: pass the bytes in {media!r} and a placeholder in the message"
            )
        case kind:
            raise ValueError(f"content part type {kind!r} is not one of text, image, video")


class TextGenerationRequestMessage(BaseModel):
    """One turn. Content may be given as dicts; a dict of an image or a video becomes a part without hints."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    role: Literal["system", "user", "assistant", "tool", "function", "root"]
    content: str | list[MessageContent] = ""
    tool_calls: list[dict[str, Any]] | None = None
    """OpenAI's shape, passed on as it is."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _normalise_content(cls, value: object) -> str | list[MessageContent]:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return [_content_part(item) for item in value]
        raise ValueError(f"content is text or a list of parts, not {type(value).__name__}")

    @cached_property
    def number_of_images(self) -> int:
        return self._count(ImageContentPart)

    @cached_property
    def number_of_videos(self) -> int:
        return self._count(VideoContentPart)

    def _count(self, kind: type[MessageContent]) -> int:
        return 0 if isinstance(self.content, str) else sum(isinstance(part, kind) for part in self.content)

    def flatten_content(self) -> dict[str, Any]:
        """The turn as a text model's template takes it, parts joined by a newline. ValueError where one is not text."""
        if isinstance(self.content, str):
            text = self.content
        else:
            other = [part.type for part in self.content if not isinstance(part, TextContentPart)]
            if other:
                raise ValueError(f"this model takes text only, and a message of role {self.role} has {other[0]} parts")
            text = "\n".join(part.text for part in self.content if isinstance(part, TextContentPart))
        extra = {
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        return {"role": self.role, "content": text} | {k: v for k, v in extra.items() if v is not None}


# --- tools and structure ---------------------------------------------------------------------------------------------


class TextGenerationRequestFunction(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: dict[str, Any]


class TextGenerationRequestTool(TypedDict):
    type: str
    function: TextGenerationRequestFunction


@dataclass
class TextGenerationResponseFormat:
    """What the output must look like. A `grammar` beats a `json_schema`; a schema of `{}` still asks for one JSON
    value, None asks for nothing."""

    type: str
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    grammar_enforced: bool = False
    tools_forced: bool = False
    requires_structured_output_flag: bool = False
    has_json_schema: bool = False

    @property
    def constrains(self) -> bool:
        return self.json_schema is not None or self.grammar is not None

    @property
    def constraint(self) -> str | dict[str, Any] | None:
        """What is enforced, if anything. Where there are both, `type` says whether the grammar counts."""
        if self.grammar is not None and (self.type == "grammar" or self.json_schema is None):
            return self.grammar
        return self.json_schema


# --- the request -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextGenerationRequest(ProcessLocal):
    request_id: RequestID
    model_name: str
    """Also names a LoRA."""
    prompt: str | Sequence[int] | None = None
    messages: list[TextGenerationRequestMessage] = field(default_factory=list)
    """Dicts are turned into messages."""
    images: list[bytes] = field(default_factory=list)
    videos: list[bytes] = field(default_factory=list)
    decoded_images: list[Any] = field(default_factory=list)
    """Decoded forms of `images`, by index; None falls back to the bytes. Never leaves this process."""
    tools: list[TextGenerationRequestTool] | None = None
    response_format: TextGenerationResponseFormat | None = None
    timestamp_ns: int = 0
    """When it arrived; 0 is unknown."""
    request_path: str = "/"
    logprobs: int = 0
    """How many of the most likely tokens to report; 0 is off."""
    echo: bool = False
    chat_template_options: dict[str, Any] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    target_endpoint: str | None = None
    """A node's name or address; looked up, never dialled."""
    dkv_cache_hint: dict[str, Any] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.messages is not None:
            object.__setattr__(self, "messages", [_message(message) for message in self.messages])
        if self.prompt and self.messages:
            raise InvalidValue("prompt", "text or tokens", "absent where messages are given")
        for name, media in (("images", self.images), ("videos", self.videos)):
            if media and isinstance(self.prompt, str):
                raise InvalidValue(name, f"{len(media)} of them", "empty with a text prompt: use messages")
        self._check_media_count("images", len(self.images), self.number_of_images)
        self._check_media_count("videos", len(self.videos), self.number_of_videos)
        if self.decoded_images and len(self.decoded_images) != len(self.images):
            raise InvalidValue("decoded_images", f"{len(self.decoded_images)} long", f"{len(self.images)}, as images")

    def _check_media_count(self, name: str, given: int, placeholders: int) -> None:
        if given != placeholders:
            raise InvalidValue(name, f"{given} long", f"as many as the messages' placeholders, {placeholders}")

    def __str__(self) -> str:
        return str(self.request_id)

    @cached_property
    def number_of_images(self) -> int:
        return sum(message.number_of_images for message in self.messages or ())

    @cached_property
    def number_of_videos(self) -> int:
        return sum(message.number_of_videos for message in self.messages or ())

    def images_for_processing(self) -> list[Any]:
        """Each image decoded where that was done already, as bytes elsewhere."""
        if not self.decoded_images:
            return list(self.images)
        return [
            raw if decoded is None else decoded for decoded, raw in zip(self.decoded_images, self.images, strict=True)
        ]


def _message(message: object) -> TextGenerationRequestMessage:
    if isinstance(message, TextGenerationRequestMessage):
        return message
    if isinstance(message, dict):
        return TextGenerationRequestMessage(**cast(dict[str, Any], message))
    raise TypeError(f"a message is a dict or a TextGenerationRequestMessage, not {type(message).__name__}")
