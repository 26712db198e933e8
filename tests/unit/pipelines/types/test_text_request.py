from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.types.text_request import (
    ImageContentPart,
    Request,
    RequestID,
    TextContentPart,
    TextGenerationRequest,
    TextGenerationRequestMessage,
    TextGenerationResponseFormat,
    VideoContentPart,
)
from pronghorn.errors import InvalidRequest


def request(**fields: Any) -> TextGenerationRequest:
    return TextGenerationRequest(request_id=RequestID("r"), model_name="m", **fields)


def message(content: Any, role: Any = "user", **fields: Any) -> TextGenerationRequestMessage:
    return TextGenerationRequestMessage(role=role, content=content, **fields)


def test_a_request_is_a_request() -> None:
    made = request()
    assert isinstance(made, Request) and str(made) == "r"
    assert made.prompt is None and made.messages == [] and made.request_path == "/"


def test_dicts_become_messages_and_others_are_a_type_error() -> None:
    given = message("hi")
    assert request(messages=[{"role": "system"}, given]).messages == [message("", "system"), given]
    with pytest.raises(TypeError):
        request(messages=["hi"])


def test_prompt_or_messages() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        request(prompt="x", messages=[message("hi")])
    assert request(prompt="", messages=[message("hi")]).messages


@pytest.mark.parametrize("name", ["images", "videos"])
def test_media_need_messages_with_as_many_placeholders(name: str) -> None:
    part = {"type": name[:-1]}
    with pytest.raises(InvalidRequest, match="text prompt"):
        request(prompt="", **{name: [b"x"]})
    with pytest.raises(InvalidRequest, match="1 long.*placeholders, 2"):
        request(messages=[message([part, part])], **{name: [b"x"]})
    with pytest.raises(InvalidRequest, match="0 long.*placeholders, 1"):
        request(messages=[message([part])])
    with pytest.raises(InvalidRequest):
        request(prompt=[1, 2], **{name: [b"x"]})
    made = request(messages=[message([part])], **{name: [b"x"]})
    assert made.number_of_images + made.number_of_videos == 1


def test_decoded_images_fall_back_by_index() -> None:
    two = [message([ImageContentPart(), ImageContentPart()])]
    assert request(messages=two, images=[b"a", b"b"]).images_for_processing() == [b"a", b"b"]
    made = request(messages=two, images=[b"a", b"b"], decoded_images=[None, "decoded"])
    assert made.images_for_processing() == [b"a", "decoded"]
    with pytest.raises(InvalidRequest, match="decoded_images is '1 long'"):
        request(messages=two, images=[b"a", b"b"], decoded_images=["decoded"])


def test_content_is_normalised() -> None:
    hinted = ImageContentPart(detail="high")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "content": "b"}, {"type": "text"}, hinted]
    assert message(parts).content == [
        TextContentPart(text="a"),
        TextContentPart(text="b"),
        TextContentPart(text=""),
        hinted,
    ]
    assert message(None).content == ""
    assert message([{"type": "image", "detail": "high"}, {"type": "video", "fps": 2}]).content == [
        ImageContentPart(),
        VideoContentPart(),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (5, "text or a list"),
        ([5], "an object"),
        ([{"text": "x"}], "needs a type"),
        ([{"type": "audio"}], "'audio'"),
        ([{"type": "image_url", "image_url": {}}], "pass the bytes in 'images'"),
        ([{"type": "video_url"}], "pass the bytes in 'videos'"),
    ],
)
def test_bad_content(content: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        message(content)


def test_roles() -> None:
    assert message("x", "root").role == "root"
    with pytest.raises(ValidationError):
        message("x", "developer")


def test_flatten() -> None:
    calls: list[dict[str, Any]] = [{"id": "1"}]
    flat = message([TextContentPart(text="a"), TextContentPart(text="b")], "assistant", tool_calls=calls)
    assert flat.flatten_content() == {"role": "assistant", "content": "a\nb", "tool_calls": calls}
    assert message("x", tool_calls=[]).flatten_content() == {"role": "user", "content": "x", "tool_calls": []}
    with pytest.raises(ValueError, match="image"):
        message([ImageContentPart()]).flatten_content()


def test_an_empty_schema_constrains_and_none_does_not() -> None:
    assert TextGenerationResponseFormat("json_schema", json_schema={}).constrains
    assert not TextGenerationResponseFormat("text").constrains
