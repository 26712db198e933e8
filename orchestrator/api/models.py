"""`GET /v1/models` and `/v1/models/{id}`: the models that are served."""

from fastapi import APIRouter

from orchestrator.api.documents import Responses
from orchestrator.api.schema import ErrorBody, ModelCard, ModelList
from orchestrator.api.served_models import ServedModel, ServedModels

OTHER_THAN_SERVED: Responses = {"4XX": {"model": ErrorBody, "description": "No such model."}}


def model_routes(models: ServedModels) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[_card(model) for model in models])

    @router.get("/v1/models/{model_id:path}", responses=OTHER_THAN_SERVED)
    async def get_model(model_id: str) -> ModelCard:
        return _card(models.named(model_id))

    return router


def _card(model: ServedModel) -> ModelCard:
    settings = model.settings
    return ModelCard(
        id=settings.model_name,
        created=settings.created_unix_s,
        owned_by="pronghorn",
        max_model_len=settings.max_length,
    )
