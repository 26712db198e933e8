import dataclasses
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel, ValidationError

from pipelines.types.sampling import SamplingParams
from pipelines.types.text_request import (
    DUMMY_REQUEST_ID,
    ImageContentPart,
    Request,
    RequestID,
    TextContentPart,
    TextGenerationRequest,
    TextGenerationRequestFunction,
    TextGenerationRequestMessage,
    TextGenerationRequestTool,
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


@pytest.mark.conformance(3)
def test_dicts_become_messages_and_others_are_a_type_error() -> None:
    given = message("hi")
    assert request(messages=[{"role": "system"}, given]).messages == [message("", "system"), given]
    with pytest.raises(TypeError):
        request(messages=["hi"])


@pytest.mark.conformance(4)
def test_prompt_or_messages() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        request(prompt="x", messages=[message("hi")])
    assert request(prompt="", messages=[message("hi")]).messages


@pytest.mark.conformance(4, 5, 7)
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


@pytest.mark.conformance(6)
def test_decoded_images_fall_back_by_index() -> None:
    two = [message([ImageContentPart(), ImageContentPart()])]
    assert request(messages=two, images=[b"a", b"b"]).images_for_processing() == [b"a", b"b"]
    made = request(messages=two, images=[b"a", b"b"], decoded_images=[None, "decoded"])
    assert made.images_for_processing() == [b"a", "decoded"]
    with pytest.raises(InvalidRequest, match="decoded_images is '1 long'"):
        request(messages=two, images=[b"a", b"b"], decoded_images=["decoded"])


@pytest.mark.conformance(8)
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


@pytest.mark.conformance(8)
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


@pytest.mark.conformance(8)
def test_roles() -> None:
    assert message("x", "root").role == "root"
    with pytest.raises(ValidationError):
        message("x", "developer")


@pytest.mark.conformance(9)
def test_flatten() -> None:
    calls: list[dict[str, Any]] = [{"id": "1"}]
    flat = message([TextContentPart(text="a"), TextContentPart(text="b")], "assistant", tool_calls=calls)
    assert flat.flatten_content() == {"role": "assistant", "content": "a\nb", "tool_calls": calls}
    assert message("x", tool_calls=[]).flatten_content() == {"role": "user", "content": "x", "tool_calls": []}
    with pytest.raises(ValueError, match="image"):
        message([ImageContentPart()]).flatten_content()


@pytest.mark.conformance(13)
def test_an_empty_schema_constrains_and_none_does_not() -> None:
    assert TextGenerationResponseFormat("json_schema", json_schema={}).constrains
    assert not TextGenerationResponseFormat("text").constrains


# --- (input, outcome) ------------------------------------------------------------------------------------------------

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
WITH_IMAGE, WITH_VIDEO = {"role": "user", "content": [IMAGE]}, {"role": "user", "content": [VIDEO]}
HI = {"role": "user", "content": "hi"}


@pytest.mark.conformance(1)
def test_an_id_is_a_hashable_frozen_uuid_in_hex() -> None:
    made = RequestID()
    assert len(made.value) == 32 and int(made.value, 16) >= 0 and made != RequestID()
    assert str(made) == made.value and {made: 1}[RequestID(made.value)] == 1
    assert DUMMY_REQUEST_ID == RequestID("cuda_graph_dummy")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.value = "x"  # type: ignore[misc]  # what is tested


@pytest.mark.conformance(2)
def test_the_eighteen_fields_and_their_defaults() -> None:
    made = request()
    values = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    assert len(values) == 18
    assert isinstance(values.pop("sampling_params"), SamplingParams)
    assert values == {
        "request_id": RequestID("r"),
        "model_name": "m",
        "prompt": None,
        "messages": [],
        "images": [],
        "videos": [],
        "decoded_images": [],
        "tools": None,
        "response_format": None,
        "timestamp_ns": 0,
        "request_path": "/",
        "logprobs": 0,
        "echo": False,
        "chat_template_options": None,
        "target_endpoint": None,
        "dkv_cache_hint": None,
        "cache_salt": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.echo = True  # type: ignore[misc]  # what is tested
    with pytest.raises(TypeError, match="model_name"):
        TextGenerationRequest(request_id=RequestID("r"))  # type: ignore[call-arg]  # what is tested


ALLOWED: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    ("neither prompt nor messages", {}, (0, 0)),
    ("no messages at all", {"messages": None}, (0, 0)),
    ("an empty prompt beside messages", {"prompt": "", "messages": [HI]}, (0, 0)),
    ("tokens", {"prompt": [1, 2]}, (0, 0)),
    ("no tokens beside messages", {"prompt": [], "messages": [HI]}, (0, 0)),
    ("media in messages", {"messages": [WITH_IMAGE, WITH_VIDEO], "images": [b"i"], "videos": [b"v"]}, (1, 1)),
    ("a decoded image", {"messages": [WITH_IMAGE], "images": [b"i"], "decoded_images": [None]}, (1, 0)),
    ("an endpoint of any form", {"target_endpoint": "nonsense"}, (0, 0)),
    ("a salt of any length", {"cache_salt": "s" * 600}, (0, 0)),
]


@pytest.mark.conformance(4, 5, 7)
@pytest.mark.parametrize(("fields", "counts"), [case[1:] for case in ALLOWED], ids=[case[0] for case in ALLOWED])
def test_requests_that_are_taken(fields: dict[str, Any], counts: tuple[int, int]) -> None:
    made = request(**fields)
    assert (made.number_of_images, made.number_of_videos) == counts


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("a message of no kind", {"messages": [5]}, TypeError, "not int"),
    ("conversion before all else", {"prompt": "x", "messages": [5], "images": [b"i"]}, TypeError, "not int"),
    ("a message that is wrong", {"messages": [{"role": "developer"}]}, ValidationError, "role"),
    ("prompt and messages", {"prompt": "x", "messages": [HI]}, InvalidRequest, "^prompt is"),
    ("tokens and messages", {"prompt": [1], "messages": [HI]}, InvalidRequest, "^prompt is"),
    ("exclusivity before media", {"prompt": "x", "messages": [HI], "images": [b"i"]}, InvalidRequest, "^prompt is"),
    ("images with a text prompt", {"prompt": "x", "images": [b"i"]}, InvalidRequest, "^images.*text prompt"),
    ("videos with a text prompt", {"prompt": "x", "videos": [b"v"]}, InvalidRequest, "^videos.*text prompt"),
    ("images with an empty prompt", {"prompt": "", "images": [b"i"]}, InvalidRequest, "^images.*text prompt"),
    ("images with tokens", {"prompt": [1], "images": [b"i"]}, InvalidRequest, "^images is '1 long'.*, 0"),
    ("more images than placeholders", {"messages": [HI], "images": [b"i"]}, InvalidRequest, "^images is '1 long'"),
    ("more videos than placeholders", {"messages": [HI], "videos": [b"v"]}, InvalidRequest, "^videos is '1 long'"),
    ("a placeholder without its image", {"messages": [WITH_IMAGE]}, InvalidRequest, "^images is '0 long'.*, 1"),
    ("a placeholder without its video", {"messages": [WITH_VIDEO]}, InvalidRequest, "^videos is '0 long'.*, 1"),
    ("an image for a video", {"messages": [WITH_VIDEO], "images": [b"i"]}, InvalidRequest, "^images"),
    (
        "fewer decoded than images",
        {"messages": [WITH_IMAGE, WITH_IMAGE], "images": [b"i", b"j"], "decoded_images": [None]},
        InvalidRequest,
        "^decoded_images is '1 long'; it must be 2",
    ),
]


@pytest.mark.conformance(3, 4, 5)
@pytest.mark.parametrize(("fields", "error", "reason"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_requests_that_are_refused(fields: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        request(**fields)
    assert isinstance(caught.value, TypeError | ValueError)


PARTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ImageContentPart, {"type": "image", "detail": None, "max_long_side_pixel": None}),
    (
        VideoContentPart,
        {"type": "video", "fps": None, "max_frames": None, "detail": None, "max_long_side_pixel": None},
    ),
]


@pytest.mark.conformance(11)
@pytest.mark.parametrize(("part", "defaults"), PARTS)
def test_hints_of_a_part_are_unset_unbounded_and_frozen(part: type[BaseModel], defaults: dict[str, Any]) -> None:
    assert part().model_dump() == defaults
    assert part(max_long_side_pixel=-5, detail="").max_long_side_pixel == -5  # type: ignore[call-arg, attr-defined]
    with pytest.raises(ValidationError):
        part().type = "text"  # type: ignore[attr-defined]  # what is tested


@pytest.mark.conformance(11)
def test_a_text_part_needs_its_text() -> None:
    with pytest.raises(ValidationError, match="text"):
        TextContentPart()  # type: ignore[call-arg]  # what is tested


MESSAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"content": ""}),
    ({"content": None}, {"content": ""}),
    ({"content": []}, {"content": []}),
    ({"content": [{"type": "text", "text": "", "content": "b"}]}, {"content": [TextContentPart(text="b")]}),
    ({"content": [{"type": "text", "text": "a", "content": "b"}]}, {"content": [TextContentPart(text="a")]}),
    ({"content": [IMAGE, IMAGE, VIDEO, {"type": "text"}]}, {"number_of_images": 2, "number_of_videos": 1}),
    ({"content": "image video"}, {"number_of_images": 0, "number_of_videos": 0}),
    ({"tool_calls": [{"id": "1", "any": {"thing": []}}]}, {"tool_calls": [{"id": "1", "any": {"thing": []}}]}),
    ({"tool_call_id": "1", "role": "tool"}, {"tool_call_id": "1", "tool_calls": None}),
    ({"reasoning_content": "so", "role": "assistant"}, {"reasoning_content": "so", "tool_call_id": None}),
    *(({"role": role}, {"role": role}) for role in ("system", "user", "assistant", "tool", "function", "root")),
]


@pytest.mark.conformance(7, 8, 10)
@pytest.mark.parametrize(("fields", "expected"), MESSAGES)
def test_messages_that_are_taken(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made = TextGenerationRequestMessage(**({"role": "user"} | fields))
    assert {name: getattr(made, name) for name in expected} == expected
    with pytest.raises(ValidationError):
        made.role = "user"


FLAT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": "x"}, {"content": "x"}),
    ({"content": []}, {"content": ""}),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "a\nb"}),
    ({"content": None, "tool_calls": []}, {"content": "", "tool_calls": []}),
    ({"content": "x", "tool_call_id": "1"}, {"content": "x", "tool_call_id": "1"}),
    ({"content": "x", "reasoning_content": ""}, {"content": "x", "reasoning_content": ""}),
]


@pytest.mark.conformance(9, 10)
@pytest.mark.parametrize(("fields", "flat"), FLAT)
def test_flattening_keeps_what_is_not_none(fields: dict[str, Any], flat: dict[str, Any]) -> None:
    made = TextGenerationRequestMessage(role="tool", **fields)
    assert made.flatten_content() == {"role": "tool", **flat}


@pytest.mark.conformance(12)
def test_the_shape_of_tools() -> None:
    assert set(get_type_hints(TextGenerationRequestTool)) == {"type", "function"}
    assert set(get_type_hints(TextGenerationRequestFunction)) == {"name", "description", "parameters"}
    tool: TextGenerationRequestTool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert request(tools=[tool]).tools == [tool]


SCHEMA: dict[str, Any] = {"type": "object"}
FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "text"}, None),
    ({"type": "json_schema"}, None),
    ({"type": "json_schema", "json_schema": {}}, {}),
    ({"type": "json_schema", "json_schema": SCHEMA}, SCHEMA),
    ({"type": "grammar", "grammar": "root ::= x"}, "root ::= x"),
    ({"type": "grammar", "grammar": "root ::= x", "json_schema": SCHEMA}, "root ::= x"),
    ({"type": "grammar", "grammar": "", "json_schema": SCHEMA}, ""),
    ({"type": "grammar", "json_schema": SCHEMA}, SCHEMA),
    ({"type": "json_schema", "grammar": "root ::= x", "json_schema": {}}, {}),
    ({"type": "json_schema", "grammar": "root ::= x"}, "root ::= x"),
]


@pytest.mark.conformance(13)
@pytest.mark.parametrize(("fields", "enforced"), FORMATS)
def test_what_a_response_format_enforces(fields: dict[str, Any], enforced: Any) -> None:
    made = TextGenerationResponseFormat(**fields)
    assert made.constraint == enforced and made.constrains == (enforced is not None)


@pytest.mark.conformance(13)
def test_defaults_of_a_response_format() -> None:
    made = TextGenerationResponseFormat("text")
    assert dataclasses.astuple(made) == ("text", None, None, False, False, False, False)
    made.grammar_enforced = made.tools_forced = True
    assert [f.name for f in dataclasses.fields(made)][3:] == [
        "grammar_enforced",
        "tools_forced",
        "requires_structured_output_flag",
        "has_json_schema",
    ]
    with pytest.raises(TypeError, match="type"):
        TextGenerationResponseFormat()  # type: ignore[call-arg]  # what is tested
