"""What an orchestrator's operations port answers, through the HTTP API too: whoever scrapes it needs one address.

`/health` and `/ready` of the API are `health.py`'s: their errors have OpenAI's shape.
"""

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from operations.metrics import CONTENT_TYPE
from operations.port import Operations


def operations_routes(operations: Operations) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(operations.metrics.text(), headers={"content-type": CONTENT_TYPE})

    @router.get("/internal/ledger")
    async def ledger() -> Response:
        return Response(msgspec.json.encode(await operations.ledger()), media_type="application/json")

    return router
