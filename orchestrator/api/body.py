"""A request body from the socket to a checked JSON object: size, time, JSON, fields.

Wrong input is told as InvalidRequest with the field, what it was and what it may be; a body over the limit is refused
as soon as that is known, whether it announced its length or came in chunks.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from pronghorn.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge

Body = TypeVar("Body", bound=BaseModel)

_SHOWN_CHARS = 80


async def read_body(request: Request, limit_bytes: int, within_s: float) -> bytes:
    """Raises RequestTooLarge, DeadlineExceeded, and starlette's ClientDisconnect."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise RequestTooLarge(f"the body has {announced} bytes; at most {limit_bytes} are allowed")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                size += len(part)
                if size > limit_bytes:
                    raise RequestTooLarge(f"the body has more than {limit_bytes} bytes, which is the most allowed")
                parts.append(part)
    except TimeoutError:
        raise DeadlineExceeded(f"the request's body did not arrive within {within_s:g} s") from None
    return b"".join(parts)


def parse_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise InvalidRequest("the body is empty; it must be a JSON object")
    try:
        parsed = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"the body is {shown(parsed)}; it must be a JSON object")
    return parsed


def check_fields(fields: Mapping[str, Any], body: type[Body], not_yet: Mapping[str, tuple[Any, ...]]) -> Body:
    """`fields` as a `body`; an explicit null counts as left out.

    `not_yet` names known fields that are not supported, each with the values that ask for nothing and are accepted.
    """
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in not_yet:
            given[name] = value
        elif not any(value == neutral and type(value) is type(neutral) for neutral in not_yet[name]):
            raise InvalidRequest(_not_supported(name, value, not_yet[name]), param=name, code="unsupported_parameter")
    try:
        return body.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from error


def _not_supported(name: str, value: object, neutral: tuple[Any, ...]) -> str:
    accepted = ", ".join([*(shown(v) for v in neutral), "null"])
    return f"{name} is {shown(value)}, which is not supported; accepted: {accepted}, or leave it out"


def invalid(error: ValidationError) -> InvalidRequest:
    """The first fault that pydantic found, in our words."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param} is not a field of this request", param=param, code="unknown_parameter")
    if first["type"] == "unsupported":
        return InvalidRequest(f"{param}: {first['msg']}", param=param, code="unsupported_parameter")
    return InvalidRequest(f"{param} is {shown(first['input'])}; it {_bound(first['type'], first['msg'])}", param=param)


def _bound(kind: str, message: str) -> str:
    """pydantic's "Input should be ..." as "must be ..."."""
    if kind == "model_type":
        return "must be an object"
    return re.sub(r"^\w+ should", "must", message).partition(" after validation")[0]


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def shown(value: object) -> str:
    """`value` as JSON would write it, cut to a length that a log line and an error message can hold."""
    text = pydantic_core.to_json(value, fallback=str).decode()
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
