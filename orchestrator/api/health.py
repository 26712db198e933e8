"""What operators ask: alive, ready, which version, what the cluster looks like; and one thing they tell it.

`/health` says that this process answers, and whether much of what it tries fails; it is 200 either way, since another
process would do no better, and asks nobody. `/ready` says whether a request could be served now.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from orchestrator.api.documents import refusals
from orchestrator.api.errors import UnknownRoute
from orchestrator.api.served_models import ServedModels
from orchestrator.ports import ClusterView
from pronghorn.errors import DeadlineExceeded, InvalidRequest, Unavailable

RESET_WITHIN_S = 10.0


def health_routes(view: ClusterView, models: ServedModels) -> APIRouter:
    router = APIRouter()
    settings = models.first.settings

    @router.get("/health")
    @router.get("/v1/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        reason = view.degraded()
        return {"status": "ok"} if reason is None else {"status": "degraded", "reason": reason}

    @router.get("/ready", responses=refusals(503))
    async def ready() -> dict[str, str]:
        is_ready, reason = view.ready()
        if not is_ready:
            raise Unavailable(reason, retry_after_s=settings.retry_after_s)
        return {"status": "ready", "reason": reason}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": settings.version}

    @router.post("/reset_prefix_cache", responses=refusals(400, 504))
    async def reset_prefix_cache() -> dict[str, str]:
        if not any(model.settings.prefix_caching for model in models):
            raise InvalidRequest("prefix caching is off in this cluster: there is nothing to reset")
        try:
            async with asyncio.timeout(RESET_WITHIN_S):
                await view.reset_prefix_cache()
        except TimeoutError:
            raise DeadlineExceeded(f"the nodes did not take the reset within {RESET_WITHIN_S:g} s") from None
        return {"status": "ok"}

    @router.get("/internal/requests/{request_id}", include_in_schema=False)
    async def explain(request_id: str) -> Response:
        """By the id in the answer, with or without what stands before it there."""
        for prefix in ("chatcmpl-", "cmpl-", "resp_"):
            request_id = request_id.removeprefix(prefix)
        record = view.explain(request_id)
        if record is None:
            raise UnknownRoute(f"no request {request_id!r} is kept here")
        return Response(msgspec.json.encode(record), media_type="application/json")

    @router.get("/internal/status")
    async def status() -> Response:
        return Response(msgspec.json.encode(_status(view, settings.version)), media_type="application/json")

    return router


def _status(view: ClusterView, version: str) -> dict[str, Any]:
    is_ready, reason = view.ready()
    return {
        "version": version,
        "models": view.models(),
        "ready": is_ready,
        "reason": reason,
        "in_flight": view.in_flight(),
        "nodes": view.nodes(),
        "counters": view.counters(),
        "gauges": view.gauges(),
    }
