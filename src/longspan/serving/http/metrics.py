"""Metrics in the form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from longspan.serving.http.errors import documented

if TYPE_CHECKING:
    from longspan.serving.http.service import Service

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
router = APIRouter()


class Metrics:
    """What is counted while serving; numbers of engines and sessions are read when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("longspan_requests", "Requests", ["route", "status"], registry=self.registry)
        self._seconds = Histogram("longspan_request_seconds", "Whole requests", registry=self.registry)
        self.first_token = Histogram(
            "longspan_first_token_seconds", "Time to the first token", buckets=_FIRST, registry=self.registry
        )
        self.between_tokens = Histogram(
            "longspan_between_tokens_seconds", "Time between tokens", buckets=_BETWEEN, registry=self.registry
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that is over."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Some tokens of one choice that came together, so long after those before them."""
        for _ in range(count):
            self.between_tokens.observe(seconds / count)


class Numbers(Collector):
    """Numbers that engines and sessions keep themselves."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "running": "Jobs in a step",
            "waiting": "Jobs that wait",
            "slots": "Jobs that fit in a step",
        }
        counters = {"tokens_generated": "Tokens generated", "tokens_read": "Tokens read"}
        for names, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"longspan_{name}", text, labels=["model"])
                for model, served in self._service.models.items():
                    metric.add_metric([model], getattr(served.engine.stats, name))
                yield metric
        sessions = self._service.sessions
        yield GaugeMetricFamily("longspan_sessions", "Sessions in memory and on disk", len(sessions.list()))
        yield GaugeMetricFamily("longspan_session_bytes", "Sessions in memory", sessions.memory_bytes)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented()},
)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms."""
    return Response(generate_latest(request.app.state.service.metrics.registry), media_type=CONTENT)
