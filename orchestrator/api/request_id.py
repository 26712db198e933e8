"""What a client calls its request: the header `X-Request-ID`, and its bounds.

Inside, requests have ids of their own; the client's is answered with, and tells a request from its own repetition.
"""

import re
from collections.abc import Mapping

from pronghorn.errors import InvalidRequest

HEADER = "x-request-id"
MAX_CHARS = 128
_USABLE = re.compile(rf"[A-Za-z0-9._:/+=-]{{1,{MAX_CHARS}}}")


def usable(given: str) -> bool:
    return _USABLE.fullmatch(given) is not None


def required_usable(headers: Mapping[str, str]) -> str | None:
    """The client's id, or None where it sent none. Raises InvalidRequest for one out of bounds."""
    given = headers.get(HEADER)
    if given is None or usable(given):
        return given
    raise InvalidRequest(
        f"X-Request-ID has {len(given)} characters, or others than A-Z a-z 0-9 . _ : / + = -; "
        f"it must be 1 to {MAX_CHARS} of these",
        param="X-Request-ID",
    )


def keys(client_id: str | None, count: int) -> list[str | None]:
    """What tells each of a request's sequences from its repetition."""
    if client_id is None:
        return [None] * count
    return [client_id, *(f"{client_id}#{index}" for index in range(1, count))]
