"""The outermost ring of the application: every response has an `X-Request-ID`, every fault becomes a 500 and a log
line.

The id in the header is the client's own where it sent a usable one, and names nothing inside: requests are told apart
by ids of our own.
"""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.errors import UNFORESEEN, error_response

log = logging.getLogger(__name__)

_USABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def header_request_id(headers: Headers) -> str:
    """What to answer under `X-Request-ID`: the client's value if it is 1 to 128 plain characters, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _USABLE.fullmatch(given) else uuid.uuid4().hex


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
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception:  # the edge: nothing above this could answer the client
            log.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if started:
                raise  # the server cuts the connection, which is the only way left to say it
            await error_response(UNFORESEEN)(scope, receive, send_marked)
