"""A text request whose prompt holds images.

Each image stands in the tokens as a span of vision tokens. Knows nothing of pictures' formats, nor of blocks: it only
says which token carries which image's hash.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.types.invalid_value import InvalidValue
from pipelines.types.text_context import TextContext

_HASH_BOUND = 2**64


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageMetadata:
    """One image: tokens `start_idx` up to, not including, `end_idx`. Compared by identity, since it holds an array."""

    start_idx: int
    end_idx: int
    pixel_values: NDArray[np.float32]
    """As the vision encoder takes them; the shape is the model's own."""
    image_hash: int | None = None
    """Of the image's content: unsigned, 64 bits, all of which enter the block's key. None where nothing is cached."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_idx < self.end_idx:
            raise InvalidValue("images", (self.start_idx, self.end_idx), "a span of tokens: 0 <= start_idx < end_idx")
        if self.image_hash is not None and not 0 <= self.image_hash < _HASH_BOUND:
            raise InvalidValue("image_hash", self.image_hash, "an unsigned number of 64 bits")


@dataclass(kw_only=True, eq=False)
class TextAndVisionContext(TextContext):
    """Raises InvalidValue where images overlap, are out of order, or do not begin and end on a vision token."""

    vision_token_ids: list[int]
    images: list[ImageMetadata] = field(default_factory=list)
    """By position; one may end where the next begins."""
    extra_model_args: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What one architecture's encoder needs besides."""
    _concrete: Literal["TextAndVisionContext"] = "TextAndVisionContext"  # type: ignore[assignment]  # each class has its own

    def __post_init__(self) -> None:
        super().__post_init__()
        previous_end = 0
        for image in self.images:
            span = (image.start_idx, image.end_idx)
            if image.start_idx < previous_end:
                raise InvalidValue("images", span, f"in order and apart: the image before ends at {previous_end}")
            if image.end_idx > len(self.tokens):
                raise InvalidValue("images", span, f"within the {len(self.tokens)} tokens")
            for index in (image.start_idx, image.end_idx - 1):
                if self.tokens[index] not in self.vision_token_ids:
                    raise InvalidValue("images", span, f"on vision tokens: token {index} is {self.tokens[index]}")
            previous_end = image.end_idx

    @property
    def token_hash_overrides(self) -> dict[int, int]:
        """What is hashed with the token at an index: the hash of the image that starts there.

        As `kvcache.hashing.BlockHasher.chain` takes it as `media`. Spans do not overlap, so no index comes twice.
        ValueError where an image has no hash: a block without it would be shared between different images.
        """
        overrides: dict[int, int] = {}
        for image in self.images:
            if image.image_hash is None:
                raise ValueError(f"request {self.request_id}: the image at token {image.start_idx} has no hash")
            overrides[image.start_idx] = image.image_hash
        return overrides
