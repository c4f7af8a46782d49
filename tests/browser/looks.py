"""What tests ask of a page: its width, the contrast of its text, the charts' numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page

_CONTRAST = """
(selector) => {
  // Colours as the canvas paints them: every form of CSS colour becomes four bytes.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function over(colours) {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  }
  function light(rgb) {
    const [r, g, b] = rgb.map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }
  return Math.min(...[...document.querySelectorAll(selector)].map((element) => {
    const behind = [];
    for (let one = element; one; one = one.parentElement) {
      behind.unshift(getComputedStyle(one).backgroundColor);
    }
    const back = light(over(["white", ...behind]));
    const front = light(over(["white", ...behind, getComputedStyle(element).color]));
    return (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
  }));
}
"""


def until(page: Page, holds: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait until it holds. (Playwright's own function for that needs `eval`, which the pages forbid.)"""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never held"
        page.wait_for_timeout(50)


def contrast(page: Page, selector: str) -> float:
    """The least contrast of text and background among the elements, as WCAG defines it."""
    return float(page.evaluate(_CONTRAST, selector))


def fits(page: Page) -> bool:
    """The page is not wider than its window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def ticks(page: Page, chart: str, axis: str = "x") -> list[str]:
    """The labels of an axis."""
    role = page.locator(f"#{chart} g[aria-roledescription='axis'][aria-label^='{axis.upper()}-axis']")
    return [text for text in role.first.locator(".role-axis-label text").all_text_contents() if text]


def fills(page: Page, chart: str) -> list[str]:
    """The colours of a heat map's cells, in order."""
    found: list[Any] = page.locator(f"#{chart} g.mark-rect.role-mark path").evaluate_all(
        "cells => cells.map((cell) => cell.getAttribute('fill'))"
    )
    return found
