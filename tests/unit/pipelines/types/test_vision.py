import numpy as np
import pytest

from kvcache.hashing import BlockHasher, pack_tokens
from pipelines.types.batch import TextGenerationInputs
from pipelines.types.vision import ImageMetadata, TextAndVisionContext
from pronghorn.errors import InvalidRequest
from tests.fakes.wire_samples import buffer

IMAGE = 9


def image(start: int, end: int, image_hash: int | None = 1) -> ImageMetadata:
    pixels = np.zeros((3, 2, 2), dtype=np.float32)
    return ImageMetadata(start_idx=start, end_idx=end, pixel_values=pixels, image_hash=image_hash)


def context(*images: ImageMetadata) -> TextAndVisionContext:
    tokens = buffer(5, IMAGE, IMAGE, IMAGE, 6, IMAGE, 7, 8)
    return TextAndVisionContext(max_length=64, tokens=tokens, vision_token_ids=[IMAGE], images=list(images))


@pytest.mark.conformance(37)
def test_images_may_touch_and_their_hashes_stand_at_their_first_token() -> None:
    made = context(image(1, 3, 7), image(3, 4, 2**64 - 1), image(5, 6, 0))
    assert made.token_hash_overrides == {1: 7, 3: 2**64 - 1, 5: 0}
    assert context().token_hash_overrides == {}


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([(3, 4), (1, 3)], "image before ends at 4"),
        ([(1, 3), (2, 4)], "image before ends at 3"),
        ([(1, 4), (1, 4)], "image before ends at 4"),
        ([(0, 3)], "token 0 is 5"),
        ([(1, 5)], "token 4 is 6"),
        ([(5, 9)], "within the 8 tokens"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        context(*(image(start, end) for start, end in images))
    assert caught.value.param == "images" and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 2), (-1, 2)])
def test_a_span_is_a_span(start: int, end: int) -> None:
    with pytest.raises(InvalidRequest, match="start_idx < end_idx"):
        image(start, end)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_hash_has_64_bits(value: int) -> None:
    with pytest.raises(InvalidRequest, match="image_hash"):
        image(1, 2, value)


@pytest.mark.conformance(37)
def test_a_missing_hash_is_an_error_where_it_is_needed() -> None:
    made = context(image(1, 3), image(3, 4, None))
    with pytest.raises(ValueError, match="token 3 has no hash"):
        _ = made.token_hash_overrides


@pytest.mark.conformance(37)
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_bit_of_a_hash_makes_another_block(bit: int) -> None:
    hasher = BlockHasher("sha256", bytes(32), "m", None, {"block_tokens": "4"})

    def blocks(image_hash: int) -> list[bytes]:
        made = context(image(1, 4, image_hash))
        packed = pack_tokens(made.tokens.all)
        return list(hasher.chain(packed, hasher.root(None), made.token_hash_overrides))

    assert blocks(0) == blocks(0) and not set(blocks(0)) & set(blocks(1 << bit))


def test_it_generates_as_a_text_context_does() -> None:
    made = context(image(1, 4))
    batch = TextGenerationInputs(batches=[[made]])
    assert batch.input_tokens == 8
    made.update(3)
    assert made.to_generation_output().tokens == [3] and made.original_prompt_length == 8
