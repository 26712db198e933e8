"""The HTTP application over a scripted generator, and ways to talk to it: in process, or by hand as an ASGI server."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from orchestrator.api.app import build_app
from orchestrator.api.served_models import ServedModels
from orchestrator.api.settings import ApiSettings
from orchestrator.ports import GenerationJob
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.scripted_generator import ScriptedGenerator, ScriptedView, Step, spoken

MODEL = "org/tiny"


def settings(**changes: Any) -> ApiSettings:
    values: dict[str, Any] = {"model_name": MODEL, "max_length": 200, "version": "1.2.3", "created_unix_s": 17}
    return ApiSettings(**(values | changes))


class Served:
    """An application with its fakes at hand."""

    def __init__(
        self,
        script: Sequence[Step] | Callable[[GenerationJob], Sequence[Step]] | None = None,
        template: str | None = None,
        **changes: Any,
    ) -> None:
        self.generator = ScriptedGenerator(spoken("hello") if script is None else script)
        self.view = ScriptedView()
        tokenizer = byte_tokenizer() if template is None else byte_tokenizer(template)
        self.app: FastAPI = build_app(self.generator, self.view, ServedModels([(tokenizer, settings(**changes))]))

    async def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | body
        return await self.request("POST", "/v1/chat/completions", json=body, headers=headers)

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hi"} | body
        return await self.request("POST", "/v1/completions", json=body, headers=headers)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, whose envelope is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def events_of(text: str) -> list[Any]:
    """The events of a stream: parsed JSON, "[DONE]", or a comment as it is."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    return [_event(block) for block in blocks]


def _event(block: str) -> Any:
    assert "\n" not in block
    if block.startswith(":"):
        return block
    data = block.removeprefix("data: ")
    assert data != block
    return data if data == "[DONE]" else json.loads(data)


class Connection:
    """Calls an ASGI application as a server would, one message at a time."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("127.0.0.1", 1),
        }
        self.call = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.put_nowait(message)

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.sent.get(), 60)
