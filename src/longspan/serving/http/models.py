"""The models, and the health of the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from longspan.serving.http.answers import ModelAnswer, ModelList, StatusAnswer
from longspan.serving.http.errors import documented
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Stopping

router = APIRouter()


def _shown(served: Served, service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "longspan",
        "vocabulary_size": served.lm.tokenizer.vocabulary_size,
        "parameters": sum(one.numel() for one in served.lm.model.parameters()),
        "limits": {
            "max_prompt_tokens": limits.prompt_tokens,
            "max_tokens": limits.generated_tokens,
            "inspected_tokens": limits.inspected_tokens,
        },
    }


@router.get("/v1/models", response_model=ModelList, responses=documented())
async def models(request: Request) -> Response:
    """The models that are served."""
    service: Service = request.app.state.service
    found = [_shown(served, service) for served in service.models.values()]
    return JSONResponse({"object": "list", "data": found})


@router.get("/v1/models/{model}", response_model=ModelAnswer, responses=documented(404, 422))
async def model(request: Request, model: str) -> Response:
    """One model."""
    service: Service = request.app.state.service
    return JSONResponse(_shown(service.model(model), service))


@router.get("/health", response_model=StatusAnswer, responses=documented())
async def health() -> Response:
    """Whether the server answers."""
    return JSONResponse({"status": "ok"})


@router.get("/ready", response_model=StatusAnswer, responses=documented())
async def ready(request: Request) -> Response:
    """Whether the server takes work: 503 while it stops."""
    if request.app.state.service.stopping:
        raise Stopping("the server is stopping")
    return JSONResponse({"status": "ready"})
