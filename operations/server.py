"""The operations port: a small HTTP server inside the process that it speaks for.

Knows routes and sockets; the answers are `Operations`'. aiohttp is named in this file only. It starts no thread and
takes no signal. What it serves tells of requests and addresses, so that it is bound where the node's gRPC server is.
"""

import contextlib

import msgspec
from aiohttp import web

from operations.metrics import CONTENT_TYPE
from operations.port import ROUTES, Operations
from pronghorn.errors import ConfigurationError

STOP_S = 1.0


class OperationsServer:
    """Made and used within one event loop."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._runner: web.AppRunner | None = None

    async def start(self, bind_host: str, dial_host: str) -> str:
        """Serve on a port that the operating system assigns; "host:port" for others to ask.

        Raises ConfigurationError where the interface cannot be bound.
        """
        app = web.Application()
        answers = (self._health, self._ready, self._metrics, self._ledger)
        app.add_routes([web.get(path, answer) for path, answer in zip(ROUTES, answers, strict=True)])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, bind_host.strip("[]"), 0).start()
        except OSError as error:
            await self.stop()
            raise ConfigurationError(f"cannot bind the operations port to {bind_host}: {error}") from error
        return f"{dial_host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(TimeoutError):
                await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        is_ready, reason = self._operations.ready()
        said = {"status": "ready" if is_ready else "not ready", "reason": reason}
        return web.json_response(said, status=200 if is_ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._operations.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _ledger(self, _: web.Request) -> web.Response:
        ledger = await self._operations.ledger()
        return web.Response(body=msgspec.json.encode(ledger), content_type="application/json")
