"""``GET /v1/models``."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moeless.server.encoding import JsonResponse
from moeless.server.openapi import answer_of
from moeless.server.schemas.answers import ModelInfo, ModelList
from moeless.server.state import ServerState, state_of

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_model=None, responses=answer_of(ModelList, 401))
async def list_models(request: Request) -> Response:
    """The model that is served, as a list."""
    return JsonResponse({"object": "list", "data": [_describe(state_of(request))]})


@router.get("/{model:path}", response_model=None, responses=answer_of(ModelInfo, 401, 404))
async def get_model(request: Request, model: str) -> Response:
    """The model that is served, by its id, which may hold slashes."""
    state = state_of(request)
    state.translator.check_model(model)
    return JsonResponse(_describe(state))


def _describe(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.engine.model_id,
        "object": "model",
        "created": state.started,
        "owned_by": "moeless",
        "max_model_len": state.engine.max_model_len,
    }
