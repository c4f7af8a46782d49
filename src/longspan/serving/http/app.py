"""The application: all routes behind the gate."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from longspan.serving.http import completions, measures, metrics, models, page, runs, sessions
from longspan.serving.http.errors import add_handlers
from longspan.serving.http.gate import Gate, Rules
from longspan.serving.http.service import ClientGone, Service
from longspan.version import VERSION

TOPICS = (models, completions, measures, sessions, runs, metrics, page)


def make_app(service: Service, rules: Rules) -> ASGIApp:
    """The application of a server."""
    app: ASGIApp = Gate(make_api(service), rules, service.metrics.request)
    if rules.origins:  # outermost, so that a page can also read what the gate answers
        app = CORSMiddleware(
            app,
            allow_origins=list(rules.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def make_api(service: Service) -> FastAPI:
    """All routes, without the gate; `/openapi.json` describes them."""
    app = FastAPI(title="Longspan", version=VERSION, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # a redirect would be an undocumented answer
    app.state.service = service
    add_handlers(app)
    app.add_exception_handler(ClientGone, _gone)
    for topic in TOPICS:
        app.include_router(topic.router)
    return app


async def _gone(request: Request, problem: Exception) -> Response:
    """Nobody reads it; the status is for the metrics."""
    return Response(status_code=499)
