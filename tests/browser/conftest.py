"""Debian's Chromium, driven by Playwright; pages are watched for errors and for requests to other places."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MILLISECONDS = 15_000  # the longest wait; the machine may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


class Open(Protocol):
    def __call__(self, url: str, *, width: int = 1200, dark: bool = False, **options: Any) -> Page: ...


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield found
        found.close()


@pytest.fixture
def allowed() -> set[str]:
    """Console errors that a test expects, as parts of them."""
    return set()


@pytest.fixture
def open_page(browser: Browser, allowed: set[str]) -> Iterator[Open]:
    """Open an address. After the test: nothing was complained of, and nobody else was asked."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    places: set[str] = set()
    own: set[str] = set()

    def place(url: str) -> str:
        return url if url.startswith("file:") else "/".join(url.split("/")[:3])

    def opened(url: str, *, width: int = 1200, dark: bool = False, **options: Any) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **options,
        )
        contexts.append(context)
        context.set_default_timeout(MILLISECONDS)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: places.add(place(request.url)))
        own.add(place(url))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not any(part in text for part in allowed)] == []
    assert {one for one in places if not one.startswith(("data:", "blob:"))} <= own
