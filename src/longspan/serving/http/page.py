"""The page and its files. Names in requests are looked up in a table; no path is made of them."""

from __future__ import annotations

import mimetypes
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from longspan.inspection import report
from longspan.inspection.report.page import PAGE_FILES
from longspan.serving.http.errors import ApiError, documented

PAGE = Path(__file__).parents[1] / "page"
REPORT = Path(report.__file__).parent  # the live tab shares scripts with the report
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter(include_in_schema=False)


@cache
def files() -> dict[str, Path]:
    """All files of the page by their names below /page/."""
    found = {path.name: path for path in PAGE.glob("*") if path.suffix in (".html", ".js", ".css", ".svg")}
    found |= {f"report/{name}": REPORT / name for name in PAGE_FILES}
    return found | {f"vendor/{path.name}": path for path in (REPORT / "vendor").glob("*.js")}


@router.get("/")
async def index() -> Response:
    """The page."""
    return await _file("index.html")


@router.get("/page/{name:path}", responses=documented(404))
async def file(name: str) -> Response:
    """A file of the page."""
    return await _file(name)


async def _file(name: str) -> Response:
    path = files().get(name)
    if path is None:
        raise ApiError(404, "there is no such file", "not_found")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Response(await run_in_threadpool(path.read_bytes), media_type=kind, headers=HEADERS)
