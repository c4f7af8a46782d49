"""The pictures of the pages in the README, from a trained run: python -m tests.browser.screenshots RUN."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from longspan.inspection.report import write_report
from tests.browser.conftest import ARGUMENTS
from tests.browser.server import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT, MOST_BYTES = 1200, 945, 300_000
PROMPT = "class TestReader(unittest.TestCase):\n    def test_read(self):\n"


def main(run: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGUMENTS))
        report(browser, Path(run), Path(place) / "report.html")
        with serving(run, "--sessions", Path(place) / "sessions") as address:
            serve(browser, address)
        browser.close()


def report(browser: Browser, run: Path, file: Path) -> None:
    write_report([run], file)
    page = browser.new_page(viewport={"width": WIDTH, "height": 1600})
    page.goto(file.as_uri())
    page.locator("#spans-masks svg").wait_for()
    page.locator("th", has_text=str(run)).evaluate("(one, name) => { one.textContent = name; }", run.name)
    page.wait_for_timeout(1000)
    charts = page.locator("#spans .charts").bounding_box()
    assert charts is not None
    kept(page, "report", charts["y"] + charts["height"] + 16)


def serve(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(120_000)
    page.goto(address)
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_role("textbox", name="Prompt").fill(PROMPT)
    page.locator("#settings").evaluate("one => { one.open = true; }")
    settings = {"max tokens": "110", "temperature": "0.7", "seed": "1"}
    for name, value in settings.items():
        page.get_by_role("spinbutton", name=name).fill(value)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#said")).to_contain_text("Text 1: finished", timeout=120_000)
    page.get_by_role("button", name="Fork").click()
    for name, seed in (("Text 2", "2"), ("Text 1", "3")):
        page.get_by_role("spinbutton", name="seed").fill(seed)
        page.get_by_role("article", name=name).get_by_role("button", name="Continue").click()
        expect(page.locator("#said")).to_contain_text(f"{name}: finished", timeout=120_000)
    page.locator("#settings").evaluate("one => { one.open = false; }")
    page.wait_for_timeout(2000)  # the look-back
    names = [
        one or ""
        for one in page.locator("#text-1 .token").evaluate_all(
            "all => all.map((one) => one.getAttribute('aria-label'))"
        )
    ]
    bits = [float(name.split()[-2]) for name in names]
    most = max(range(len(PROMPT), len(bits)), key=bits.__getitem__)
    page.locator("#text-1 .token").nth(most).hover()
    kept(page, "serve", HEIGHT)


def kept(page: Page, name: str, height: float) -> None:
    """The upper part of the window."""
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    with Image.open(path) as picture:
        plain = picture.convert("RGB")
    plain.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {plain.width} x {plain.height}, {size:,} bytes")
    assert size < MOST_BYTES


if __name__ == "__main__":
    main(*sys.argv[1:])
