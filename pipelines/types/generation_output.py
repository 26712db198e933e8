"""What an image, video or audio pipeline gives back: finished media, encoded."""

import msgspec

from pipelines.types.status import GenerationStatus
from pronghorn.ids import RequestID


class OutputImageContent(msgspec.Struct, frozen=True, tag="output_image"):
    data: bytes
    format: str = "jpeg"


class OutputVideoContent(msgspec.Struct, frozen=True, tag="output_video"):
    data: bytes
    format: str = "mp4"


class OutputAudioContent(msgspec.Struct, frozen=True, tag="output_audio"):
    data: bytes
    format: str = "wav"


OutputContent = OutputImageContent | OutputVideoContent | OutputAudioContent


class GenerationUsage(msgspec.Struct, frozen=True):
    """Tokens, as a client is billed for them."""

    input_tokens: int = 0
    output_tokens: int = 0


class GenerationOutput(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    request_id: RequestID
    final_status: GenerationStatus
    output: list[OutputContent]
    usage: GenerationUsage | None = None

    @property
    def is_done(self) -> bool:
        return self.final_status.is_done
