"""Errors as HTTP says them: OpenAI's envelope, a status, `Retry-After` where waiting helps.

Every error of the service leaves through this file, the ones that the framework makes itself included. A fault nobody
foresaw is told as a generic 500 and never with its text, which may hold other people's data.
"""

import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from orchestrator.api.endings import ClientGone
from pronghorn.errors import ClientError, InternalError, PronghornError

UNFORESEEN = InternalError("the server failed to process the request; it has been logged under the request's id")


class UnknownRoute(ClientError):
    http_status = 404
    default_code = "unknown_url"


class MethodNotAllowed(ClientError):
    http_status = 405
    default_code = "method_not_supported"


def envelope(error: PronghornError) -> bytes:
    """The JSON body `{"error": {message, type, param, code}}`."""
    body = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": body})


def error_response(error: PronghornError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.http_status in (429, 503) or error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    return Response(envelope(error), error.http_status, headers, "application/json")


async def _on_pronghorn_error(_: Request, error: Any) -> Response:
    # What is left of a body that was refused is not read, so the connection cannot carry another request.
    return error_response(error, {"connection": "close"} if error.http_status == 413 else None)


async def _on_http_exception(request: Request, error: Any) -> Response:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(UnknownRoute(f"unknown request URL: {where}"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return error_response(MethodNotAllowed(f"not allowed: {where}; it takes {allowed}"), error.headers)
    return error_response(ClientError(str(error.detail)) if error.status_code < 500 else UNFORESEEN)


async def _on_client_gone(_: Request, __: Any) -> Response:
    return Response(status_code=499)  # nobody reads it


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(PronghornError, _on_pronghorn_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(ClientGone, _on_client_gone)
