"""The outermost ring of the application: every response has an `X-Request-ID`, every fault becomes a 500 and a log
line.

The id in the header is the client's own where it sent a usable one (`request_id.py`).
"""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.errors import UNFORESEEN, error_response
from orchestrator.api.request_id import HEADER, usable

log = logging.getLogger(__name__)


def header_request_id(headers: Headers) -> str:
    """What to answer under `X-Request-ID`: the client's value if it is usable, else a fresh one."""
    given = headers.get(HEADER, "")
    return given if usable(given) else uuid.uuid4().hex


class RequestEdge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = header_request_id(Headers(scope=scope))
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception:  # the edge: nothing above this could answer the client
            log.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if started:
                raise  # the server cuts the connection, which is the only way left to say it
            await error_response(UNFORESEEN)(scope, receive, send_marked)
