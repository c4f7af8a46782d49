"""The page of `longspan inspect` in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from longspan.cli import main
from tests.browser.conftest import Open
from tests.browser.looks import contrast, fits
from tests.using.tiny import run_folder

TEXT = "def f(x):\n    return x + 1\n\n</script><b>ü</b>"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    run = run_folder(folder / "run")
    text, page = folder / "a text.txt", folder / "page.html"
    text.write_text(TEXT)
    assert main(["inspect", str(run.path), str(text), "--html", str(page), "--quiet"]) == 0
    return page


def test_a_token_under_the_pointer_shows_its_cost_and_its_heads(page_file: Path, open_page: Open) -> None:
    page = open_page(page_file.as_uri())
    tokens = page.locator("#tokens .token")
    assert tokens.count() == len(TEXT.encode())
    tokens.nth(4).hover()
    expect(page.get_by_role("heading", name=re.compile(r'^Token 4, "f": \d+\.\d{3} bits$'))).to_be_visible()
    rows = page.locator("#token-heads tbody tr")
    assert rows.count() == 4  # two layers of two heads
    assert re.fullmatch(r"11\d+\.\d\d+0\.\d\d .*\(\d+ back\).*", rows.first.text_content() or "")
    looked = re.findall(r"\((\d+) back\)", page.locator("#token-heads").text_content() or "")
    seen = {4 - int(distance) for distance in looked} - {-1, -2, -3, -4, -5, -6, -7, -8}
    found = tokens.evaluate_all("all => all.flatMap((one, n) => (one.matches('.seen') ? [n] : []))")
    assert found
    assert set(found) <= seen
    tokens.nth(9).hover()  # the end of a line has a mark to point at
    expect(page.locator("#token-title")).to_contain_text('Token 9, "\\n"')


def test_tokens_by_keyboard(page_file: Path, open_page: Open) -> None:
    page = open_page(page_file.as_uri())
    title = page.locator("#token-title")
    area = page.get_by_role("listbox", name="Tokens")
    for _ in range(4):
        page.keyboard.press("Tab")
        if area.evaluate("one => one === document.activeElement"):
            break
    expect(title).to_contain_text("Token 0,")
    for key, number in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowDown", 12),  # the third of the next line
        ("ArrowUp", 2),
        ("ArrowLeft", 1),
        ("End", len(TEXT.encode()) - 1),
        ("ArrowRight", len(TEXT.encode()) - 1),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        expect(title).to_contain_text(f"Token {number},")
        assert area.get_attribute("aria-activedescendant") == f"tokens-{number}"
    chosen = page.get_by_role("option", selected=True)
    expect(chosen).to_have_accessible_name(re.compile(r'^"d", \d+\.\d bits$'))


def test_a_tap_on_a_phone(page_file: Path, open_page: Open) -> None:
    page = open_page(page_file.as_uri(), width=375, has_touch=True)
    page.locator("#tokens .token").nth(5).tap()
    expect(page.locator("#token-title")).to_contain_text('Token 5, "("')
    assert fits(page)


@pytest.mark.parametrize("dark", [False, True])
def test_shaded_tokens_can_be_read(page_file: Path, open_page: Open, dark: bool) -> None:
    page = open_page(page_file.as_uri(), dark=dark)
    page.locator("#tokens .token").nth(4).hover()
    assert contrast(page, ".token, h1, h2, td, th, p") >= 4.5
    page.locator("#tokens .token").evaluate_all(
        "all => all.forEach((one) => one.style.setProperty('--shade', '100%'))"
    )
    assert contrast(page, ".token") >= 4.5  # also the strongest shade


def test_names_for_a_screen_reader(page_file: Path, open_page: Open) -> None:
    page = open_page(page_file.as_uri())
    page.locator("#tokens").focus()
    tree = page.locator("body").aria_snapshot()
    for part in ['listbox "Tokens"', 'region "Totals"', 'columnheader "mean distance"', 'heading "Token 0']:
        assert part in tree
    assert re.search(r'option "\\"d\\", \d+\.\d bits" \[selected\]', tree), tree
