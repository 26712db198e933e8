"""`GET /v1/models` and `/v1/models/{id}`: the one model that is served."""

from fastapi import APIRouter

from orchestrator.api.documents import Responses
from orchestrator.api.schema import ErrorBody, ModelCard, ModelList
from orchestrator.api.settings import ApiSettings
from pronghorn.errors import ModelNotFound

OTHER_THAN_SERVED: Responses = {"4XX": {"model": ErrorBody, "description": "No such model."}}


def model_routes(settings: ApiSettings) -> APIRouter:
    router = APIRouter()
    card = ModelCard(
        id=settings.model_name,
        created=settings.created_unix_s,
        owned_by="pronghorn",
        max_model_len=settings.max_length,
    )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @router.get("/v1/models/{model_id:path}", responses=OTHER_THAN_SERVED)
    async def get_model(model_id: str) -> ModelCard:
        if model_id != card.id:
            raise ModelNotFound(f"the model {model_id!r} does not exist; served: {card.id!r}", param="model")
        return card

    return router
