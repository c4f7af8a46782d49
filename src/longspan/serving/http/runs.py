"""Run folders: what a report shows of them, for the page. Only folders that the server was started with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from longspan.inspection.report.data import run_data
from longspan.json_text import to_json
from longspan.serving.http.answers import RunList
from longspan.serving.http.errors import ApiError, documented
from longspan.serving.http.service import Service

router = APIRouter(prefix="/v1/runs")
_DATA: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}


@router.get("", response_model=RunList, responses=documented())
async def runs(request: Request) -> Response:
    """The runs that are served or watched; `model` is the id of a served one."""
    service: Service = request.app.state.service
    found = [
        {"name": name, "object": "run", "model": name if name in service.models else None}
        for name in service.runs
    ]
    return JSONResponse({"object": "list", "data": found})


@router.get("/{name}", response_class=Response, responses={200: {"content": _DATA}, **documented(404, 422)})
async def one(request: Request, name: str) -> Response:
    """Curves, spans, search and samples of a run so far."""
    service: Service = request.app.state.service
    folder = service.runs.get(name)
    if folder is None:
        raise ApiError(404, f"there is no run '{name}': see /v1/runs", "run_not_found", "name")
    data = await run_in_threadpool(run_data, folder)
    text = await run_in_threadpool(to_json, {**data, "folder": name})
    return Response(text, media_type="application/json")
