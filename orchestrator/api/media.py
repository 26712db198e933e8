"""Content parts that are not text, as a model that takes text only refuses them: by what they are and where.

At most MAX_MEDIA of them are taken in a request, which is none, so the first one is one too many. Nothing is
ever fetched: a URL in a message is not even looked at, so there is nothing that a client could ask of this process's
network.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

MEDIA_PARTS: Mapping[str, str] = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "a video",
    "video_url": "a video",
    "input_video": "a video",
    "file": "a file",
    "input_file": "a file",
}
"""Types of content parts, and what they are."""
MAX_MEDIA = 0


def refused_part(index: int, part: Any, supported: str) -> PydanticCustomError:
    """The error of a part that is not of a type among `supported`."""
    if not isinstance(part, dict):
        return PydanticCustomError("content", "part {index} must be an object with a type", {"index": index})
    kind = str(part.get("type"))[:80]
    context = {"index": index, "type": kind, "supported": supported, "what": MEDIA_PARTS.get(kind), "most": MAX_MEDIA}
    if kind in MEDIA_PARTS:
        return PydanticCustomError(
            "unsupported", "part {index} is {what} ({type}); this model takes text only, and {most} of these", context
        )
    return PydanticCustomError(
        "unsupported", "part {index} has type {type}, which is not supported; supported: {supported}", context
    )
