"""The outermost ring of the application: every response has an `X-Request-ID`, every fault becomes a 500 and a log
line.

The id in the header is the client's own where it sent a usable one (`request_id.py`).
"""

import logging
import uuid
from collections.abc import Callable

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.errors import UNFORESEEN, error_response
from orchestrator.api.request_id import HEADER, usable
from orchestrator.explanation import RequestRecord

log = logging.getLogger(__name__)

EXPLAIN_HEADER = "x-explain"
"""Of a request: 1 asks for the header below."""
EXPLANATION_HEADER = "x-explanation"
"""Of an answer: the request's record (`orchestrator/explanation.py`) as far as it goes when the answer begins, JSON."""


def header_request_id(headers: Headers) -> str:
    """What to answer under `X-Request-ID`: the client's value if it is usable, else a fresh one."""
    given = headers.get(HEADER, "")
    return given if usable(given) else uuid.uuid4().hex


class RequestEdge:
    def __init__(self, app: ASGIApp, explain: Callable[[str], RequestRecord | None]) -> None:
        self._app = app
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = header_request_id(headers)
        wants_explanation = headers.get(EXPLAIN_HEADER, "") in ("1", "true")
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer = MutableHeaders(scope=message)
                answer[HEADER] = request_id
                if wants_explanation and (record := self._explain(scope.get("state", {}).get("request_id", ""))):
                    answer[EXPLANATION_HEADER] = msgspec.json.encode(record).decode()
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception:  # the edge: nothing above this could answer the client
            log.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if started:
                raise  # the server cuts the connection, which is the only way left to say it
            await error_response(UNFORESEEN)(scope, receive, send_marked)
