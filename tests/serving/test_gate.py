"""Who may ask: hosts, origins, the API key, and what a page may load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longspan.serving.http.gate import Rules
from tests.serving.running import Client, real_service, running

KEY = "correct-horse"


@pytest.fixture(scope="module")
def locked() -> Iterator[Client]:
    rules = Rules(key=KEY.encode(), origins=("https://friend.example",))
    with running(real_service(), rules) as (found, _):
        yield found


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LocalHost:8000", "[::1]:9"])
def test_names_of_this_machine(client: Client, host: str) -> None:
    assert client.get("/v1/models", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[", "", "a b"]
)
def test_another_host_is_dns_rebinding(client: Client, host: str) -> None:
    found = client.get("/v1/models", Host=host)
    assert found.status in (400, 403)
    if found.status == 403:
        assert found.code == "wrong_host"
    assert client.post("/v1/completions", {"model": "tiny"}, Host=host).status in (400, 403)


def test_with_a_host_given_any_name_is_allowed() -> None:
    with running(real_service(), Rules(hosts=None)) as (client, _):
        assert client.get("/v1/models", Host="server.example").status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://[", "file://"]
)
def test_pages_of_other_origins_may_not_ask(client: Client, origin: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/sessions/x/fork"), ("OPTIONS", "/v1/models")):
        found = client.ask(method, path, headers={"Origin": origin})
        assert (found.status, found.code) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in found.headers


def test_the_own_page_may_ask(client: Client) -> None:
    found = client.get("/v1/models", Origin=client.url)
    assert found.status == 200
    assert "access-control-allow-origin" not in found.headers


def test_an_allowed_origin(locked: Client) -> None:
    headers = {"Origin": "https://friend.example", "Authorization": f"Bearer {KEY}"}
    found = locked.get("/v1/models", **headers)
    assert found.headers["access-control-allow-origin"] == "https://friend.example"
    before = {
        "Origin": "https://friend.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    asked = locked.ask("OPTIONS", "/v1/completions", headers=before)
    assert asked.status == 200
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert locked.get("/v1/models", Origin="https://other.example").status == 403
    refused = locked.get("/v1/models", Origin="https://friend.example")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://friend.example")


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9", KEY],
)
def test_without_the_key(locked: Client, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for path in ("/v1/models", "/v1/runs", "/metrics", "/openapi.json", "/v1/nothing"):
        found = locked.get(path, **headers)
        assert (found.status, found.code) == (401, "invalid_api_key")
        assert found.headers["www-authenticate"] == "Bearer"
        assert KEY not in found.body.decode()
    assert locked.post("/v1/completions", {"model": "tiny"}, **headers).status == 401


def test_with_the_key(locked: Client) -> None:
    for given in (f"Bearer {KEY}", f"bearer  {KEY}"):
        assert locked.get("/v1/models", Authorization=given).status == 200


def test_what_needs_no_key(locked: Client) -> None:
    assert locked.get("/health").json == {"status": "ok"}
    assert locked.get("/ready").json == {"status": "ready"}
    assert locked.get("/page/vendor/vega.min.js").status == 200


def test_the_page_may_load_only_its_own_files(client: Client) -> None:
    found = client.get("/page/vendor/vega.min.js")
    assert "javascript" in found.headers["content-type"]
    rules = found.headers["content-security-policy"].split("; ")
    assert rules[:2] == ["default-src 'none'", "script-src 'self'"]
    assert "unsafe" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert client.get("/v1/models").headers["x-content-type-options"] == "nosniff"
