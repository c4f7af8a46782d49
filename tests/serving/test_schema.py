"""Requests drawn from the description of the interface: no 5xx, and no answer that is not described.

Most are valid by their types, and some are not. A short run is part of the normal suite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as described

from longspan.serving.limits import Limits
from tests.serving.running import Client, real_service, running

LIMITS = Limits(generated_tokens=20, prompt_tokens=2000, inspected_tokens=100, sessions=50)
CHECKS = (
    checks.not_a_server_error,
    described.status_code_conformance,
    described.content_type_conformance,
    described.response_schema_conformance,
    described.response_headers_conformance,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("sessions")
    with running(real_service(LIMITS, folder=folder)) as (client, _):
        yield client


def described_operations(client: Client) -> Any:
    return schemathesis.openapi.from_dict(client.get("/openapi.json").json)


def draw(client: Client, examples: int, mode: GenerationMode) -> int:
    """Send that many requests to every operation; returns their number. Half of the sessions exist."""
    sent, positive = 0, mode == GenerationMode.POSITIVE
    for session in client.get("/v1/sessions").json["data"]:
        client.ask("DELETE", f"/v1/sessions/{session['id']}")
    sessions = [client.session("some text") for _ in range(3)]

    for result in described_operations(client).get_all_operations():
        operation = result.ok()

        @hypothesis.given(
            case=operation.as_strategy(generation_mode=mode), known=hypothesis.strategies.integers(0, 5)
        )
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        def one(case: Any, known: int) -> None:
            nonlocal sent
            if (
                positive
                and known < 3
                and "session" in (case.path_parameters or {})
                and case.operation.method != "delete"
            ):
                case.path_parameters["session"] = sessions[known]
            if positive and known % 2 == 0 and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"
            response = case.call(base_url=client.url, timeout=20)
            case.validate_response(response, checks=CHECKS)
            sent += 1

        with contextlib.suppress(
            *(() if positive else (hypothesis.errors.Unsatisfiable, pytest.skip.Exception))
        ):
            one()  # nothing can be wrong in a request without fields
    return sent


def test_drawn_requests(server: Client) -> None:
    operations = len(list(described_operations(server).get_all_operations()))
    assert operations >= 18
    assert draw(server, 3, GenerationMode.POSITIVE) >= operations * 2
    assert draw(server, 2, GenerationMode.NEGATIVE) >= operations
    assert server.complete("a", max_tokens=2).status == 200


@pytest.mark.slow
def test_many_drawn_requests(server: Client) -> None:
    for mode in GenerationMode:
        assert draw(server, 100, mode) > 800
    assert server.complete("a", max_tokens=2).status == 200


def test_every_route_of_the_interface_is_described(server: Client) -> None:
    paths = server.get("/openapi.json").json["paths"]
    assert {"/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/score", "/v1/inspect"} < set(paths)
    assert {
        f"/v1/sessions/{{session}}/{verb}" for verb in ("append", "generate", "fork", "save", "file")
    } < set(paths)
    for path, operations in paths.items():
        for method, operation in operations.items():
            errors = {status for status in operation["responses"] if status >= "400"}
            assert {"401", "403", "500", "503"} <= errors, path
            if method == "post":
                assert {"413", "415"} <= errors, path
