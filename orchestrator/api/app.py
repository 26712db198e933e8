"""The HTTP application: OpenAI's routes over a `Generator`, operators' routes over a `ClusterView`.

Everything it needs is passed in and lives in closures: it works with or without a lifespan, under uvicorn as under
Ray Serve. Making it starts nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from operations.port import Operations
from orchestrator.api.chat import chat_routes
from orchestrator.api.completions import completion_routes
from orchestrator.api.documents import body_schemas
from orchestrator.api.edge import RequestEdge
from orchestrator.api.errors import install_error_handlers
from orchestrator.api.health import health_routes
from orchestrator.api.models import model_routes
from orchestrator.api.operations import operations_routes
from orchestrator.api.responses import responses_routes
from orchestrator.api.responses_schema import ResponsesRequest
from orchestrator.api.schema import ChatCompletionRequest, CompletionRequest
from orchestrator.api.served_models import ServedModels
from orchestrator.api.services import Services
from orchestrator.api.tokens import DetokenizeRequest, TokenizeRequest, token_routes
from orchestrator.api.workshop import Workshop
from orchestrator.ports import ClusterView, Generator
from pronghorn.clock import SystemClock
from pronghorn.tasks import Owner

_STOP_GRACE_S = 1.0
BODIES = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)


class Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            schema.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas(*BODIES))
        assert self.openapi_schema is not None
        return self.openapi_schema


def build_app(
    generator: Generator,
    view: ClusterView,
    models: ServedModels,
    operations: Operations | None = None,
) -> FastAPI:
    """Without `operations` neither `/metrics` nor `/internal/ledger` is served."""
    settings = models.first.settings
    services = Services(
        generator=generator,
        view=view,
        models=models,
        settings=settings,
        clock=SystemClock(),
        owner=Owner("api"),
        workshop=Workshop(settings),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await services.owner.stop(_STOP_GRACE_S)
        services.workshop.close()

    app = Api(title="Pronghorn", version=settings.version, lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(RequestEdge, explain=view.explain)
    install_error_handlers(app)
    for router in (
        chat_routes(services),
        completion_routes(services),
        responses_routes(services),
        token_routes(services),
        model_routes(models),
        health_routes(view, models),
    ):
        app.include_router(router)
    if operations is not None:
        app.include_router(operations_routes(operations))
    return app
