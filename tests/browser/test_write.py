"""The tab Write of the page of `longspan serve`, in a browser, against the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.conftest import Open
from tests.browser.looks import contrast, fits, until
from tests.browser.server import PROMPT, serving, trained_run

TOKENS = 40


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    with serving(trained_run(folder), "--sessions", folder / "sessions") as found:
        yield found


@pytest.fixture
def start(address: str, open_page: Open) -> Open:
    """Opens the page and waits until it knows the models."""

    def opened(url: str = address, *, tokens: int = TOKENS, **options: object) -> Page:
        page = open_page(url, **options)  # type: ignore[arg-type]
        expect(page.get_by_role("combobox", name="model")).to_have_value("small")
        page.get_by_text("Settings").click()
        page.get_by_role("spinbutton", name="max tokens").fill(str(tokens))
        # Only letters of the text: other bytes may be parts of a character, and not tokens of the page.
        page.get_by_role("spinbutton", name="top-k").fill("8")
        page.get_by_role("textbox", name="Prompt").fill(PROMPT)
        return page

    return opened  # type: ignore[return-value]


def generated(page: Page) -> Page:
    """After a generation, and the look-back at all tokens."""
    page.get_by_role("button", name="Generate").click()
    return finished(page)


def finished(page: Page) -> Page:
    expect(page.locator("#said")).to_contain_text("finished")
    page.locator(".branch .token").first.hover()
    expect(page.locator("#token table.heads").first).to_be_visible()
    return page


def text_of(branch: Locator) -> str:
    return branch.locator(".text").evaluate("one => one.textContent")  # type: ignore[no-any-return]


def test_text_streams_in_shaded_by_its_surprise(start: Open) -> None:
    page = start()
    page.get_by_role("textbox", name="Prompt").press("Control+Enter")
    branch = page.get_by_role("article", name="Text 1")
    expect(branch.get_by_role("listbox")).to_have_attribute("aria-label", "Text 1, tokens")
    finished(page)
    assert text_of(branch).startswith(PROMPT)
    assert branch.locator(".token").count() == len(PROMPT) + TOKENS  # bytes of plain text
    shades = branch.locator(".token").evaluate_all(
        "all => all.map((t) => t.style.getPropertyValue('--shade'))"
    )
    assert all(re.fullmatch(r"\d+%", shade) for shade in shades)
    assert len(set(shades)) > 10
    expect(branch.locator("header")).to_contain_text(f"{len(PROMPT) + TOKENS} tokens")
    expect(page.locator("#said")).to_have_text(
        re.compile(rf"^Text 1: finished, {TOKENS} tokens, \d\.\d\d bits each\.$")
    )
    assert page.locator(".branch [aria-live]").count() == 0  # only the end is announced
    expect(page.locator("#legend")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


def test_a_token_shows_bits_alternatives_and_look_back(start: Open) -> None:
    page = generated(start())
    tokens = page.locator(".branch .token")
    tokens.nth(len(PROMPT) + 3).hover()
    title = page.get_by_role("heading", name=re.compile(r"^Token \".+\": \d+\.\d\d bits$"))
    expect(title).to_be_visible()
    rows = page.locator("table.alternatives tbody tr")
    assert rows.count() in (5, 6)
    parts = [float(text.rstrip("%")) for text in rows.locator("td").all_text_contents()]
    assert parts == sorted(parts, reverse=True)
    assert sum(parts) <= 100.5
    assert rows.filter(has_text="chosen").count() == 1
    heads = page.locator("table.heads tbody tr")
    assert heads.count() == 1  # layers
    cells = heads.locator("td").all_text_contents()
    assert len(cells) == 2  # heads
    assert all(re.fullmatch(r"\d+\.\d ≤\d+", cell) for cell in cells), cells
    # A wide table scrolls in its own region and does not widen the panel.
    widened = """side => {
        for (const cell of side.querySelectorAll(".heads td")) cell.textContent = "9".repeat(40);
        const table = side.querySelector(".scroll");
        return [side.scrollWidth - side.clientWidth, table.scrollWidth > side.clientWidth];
    }"""
    assert page.locator(".side").evaluate(widened) == [0, True]
    bits = float((title.text_content() or "").split()[-2])
    chosen = float((rows.filter(has_text="chosen").locator("td").text_content() or "").rstrip("%"))
    assert 2**-bits * 100 == pytest.approx(chosen, rel=0.05, abs=0.1)


def test_tokens_by_arrow_keys(start: Open) -> None:
    page = generated(start())
    area = page.get_by_role("listbox")
    area.focus()
    page.keyboard.press("End")
    expect(area.get_by_role("option", selected=True)).to_have_count(1)
    last = page.locator("#token-title").text_content()
    page.keyboard.press("Home")
    expect(page.locator("#token-title")).to_contain_text('Token "t"')
    assert area.get_attribute("aria-activedescendant") == page.locator(".branch .token").first.get_attribute(
        "id"
    )
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#token-title")).to_contain_text('Token "c"')
    assert last != page.locator("#token-title").text_content()


def test_a_fork_continues_on_its_own(start: Open) -> None:
    page = generated(start())
    page.get_by_role("button", name="Fork").click()
    one, two = page.get_by_role("article", name="Text 1"), page.get_by_role("article", name="Text 2")
    expect(two).to_be_visible()
    before = text_of(one)
    assert text_of(two) == before
    two.locator(".token").nth(3).hover()
    one.locator(".token").nth(2).hover()
    expect(page.locator(".token[aria-selected=true]")).to_have_count(1)  # of both texts
    boxes = one.bounding_box(), two.bounding_box()
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]  # side by side
    expect(two.get_by_role("button", name="Continue")).to_be_focused()
    two.get_by_label("Add text").fill("a dog ")
    two.get_by_label("Add text").press("Control+Enter")
    expect(page.locator("#said")).to_contain_text("Text 2: finished")
    assert text_of(one) == before
    after = text_of(two)
    assert after.startswith(before + "a dog ")
    assert len(after) > len(before) + 6
    for branch in (one, two):  # at once
        branch.get_by_role("button", name="Continue").click()
    expect(one.locator("header")).to_contain_text(f"{len(PROMPT) + 2 * TOKENS} tokens")
    expect(two.locator("header")).to_contain_text(f"{len(PROMPT) + 3 * TOKENS + 6} tokens")
    expect(page.get_by_role("button", name="Continue")).to_have_count(2)
    assert text_of(one).startswith(before)
    assert text_of(two).startswith(after)
    assert text_of(one)[len(before) :] != text_of(two)[len(after) :]
    row = page.locator("#session-list li").filter(has_text="Text 2")
    expect(row).to_contain_text(f"{len(PROMPT) + 3 * TOKENS + 6} tokens")


def test_a_stopped_text_is_the_text_of_its_session(start: Open, allowed: set[str]) -> None:
    allowed.add("status of 409")  # until the server has noticed that the stream is closed
    page = start(tokens=16_000)
    page.get_by_role("button", name="Generate").click()
    until(page, lambda: page.locator(".branch .token").count() > 30)
    stop = page.locator("#stop")
    expect(stop).to_be_visible()
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    expect(page.get_by_role("button", name="Fork")).to_be_disabled()
    cursor = page.locator(".text.running").evaluate("one => getComputedStyle(one, '::after').animationName")
    assert cursor == "none"  # the browser asks for less motion
    page.keyboard.press("Escape")
    expect(stop).to_be_hidden()
    branch = page.get_by_role("article", name="Text 1")
    size = len(text_of(branch).encode())
    assert 30 < size < 10_000
    expect(branch.locator("header")).to_contain_text(f"{size:,} tokens")
    page.get_by_role("spinbutton", name="max tokens").fill("5")
    branch.get_by_role("button", name="Continue").click()
    expect(branch.locator("header")).to_contain_text(f"{size + 5:,} tokens")


def test_the_seed_decides_the_text(start: Open) -> None:
    page = start(tokens=20)
    texts = []
    for seed in ("5", "5", "6"):
        page.get_by_role("spinbutton", name="seed").fill(seed)
        name = f"Text {len(texts) + 1}"
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#said")).to_contain_text(f"{name}: finished")
        texts.append(text_of(page.get_by_role("article", name=name)))
    assert texts[0] == texts[1] != texts[2]
    assert page.get_by_role("article").count() == 1  # a new text takes the place of the old one


def test_sessions_are_saved_downloaded_uploaded_and_deleted(start: Open, tmp_path: Path) -> None:
    page = generated(start())
    row = page.locator("#session-list li").filter(has_text="Text 1")
    row.get_by_role("button", name="Save Text 1").click()
    expect(row).to_contain_text("· saved")
    with page.expect_download() as download:
        row.get_by_role("button", name="Download Text 1").click()
    file = tmp_path / "state.safetensors"
    download.value.save_as(file)
    assert download.value.suggested_filename == "text-1.safetensors"
    page.get_by_label("Upload a session").set_input_files(file)
    added = page.locator("#session-list li").filter(has_text="Text 2")
    expect(added).to_contain_text(f"{len(PROMPT) + TOKENS} tokens")
    added.get_by_role("button", name="Open Text 2").click()
    branch = page.get_by_role("article", name="Text 2")
    assert text_of(branch) == text_of(page.get_by_role("article", name="Text 1"))
    branch.get_by_role("button", name="Continue").click()
    expect(page.locator("#said")).to_contain_text("Text 2: finished")
    row.get_by_role("button", name="Delete Text 1").click()
    expect(row).to_have_count(1)
    row.get_by_role("button", name="Really delete Text 1").click()
    expect(row).to_have_count(0)
    expect(page.get_by_role("article", name="Text 1")).to_have_count(0)


def test_a_session_is_found_again_after_a_reload(start: Open) -> None:
    page = generated(start())
    before = text_of(page.get_by_role("article"))
    page.reload()
    page.get_by_role("button", name="Open Text 1").click()
    assert text_of(page.get_by_role("article", name="Text 1")) == before


def test_a_damaged_upload_is_refused_in_one_line(start: Open, tmp_path: Path, allowed: set[str]) -> None:
    allowed.add("status of 4")
    page = start()
    file = tmp_path / "bad.safetensors"
    file.write_bytes(b"not a state")
    page.get_by_label("Upload a session").set_input_files(file)
    problem = page.get_by_role("alert")
    expect(problem).to_be_visible()
    assert "\n" not in (page.locator("#problem-text").text_content() or "\n")
    page.get_by_role("button", name="Close").click()
    expect(problem).to_be_hidden()


def test_a_problem_stays_when_the_list_of_sessions_comes_late(
    start: Open, tmp_path: Path, allowed: set[str]
) -> None:
    allowed.add("status of 4")
    page = start()
    waiting: list[Route] = []
    page.route("**/v1/sessions", lambda route: waiting.append(route))
    page.reload()
    until(page, lambda: waiting)
    file = tmp_path / "bad.safetensors"
    file.write_bytes(b"not a state")
    page.get_by_label("Upload a session").set_input_files(file)
    problem = page.get_by_role("alert")
    expect(problem).to_be_visible()
    session = {"id": "one", "model": "small", "tokens": 3, "saved": False, "last_used": 0}
    waiting[0].fulfill(json={"data": [session]})
    expect(page.locator("#session-list li")).to_have_count(1)
    expect(problem).to_be_visible()


def test_problems_say_what_to_do(start: Open, allowed: set[str]) -> None:
    allowed |= {"status of 429", "ERR_FAILED"}
    page = start()
    problem = page.locator("#problem-text")
    body = (
        '{"error": {"message": "the queue is full", "type": "rate_limit_error", "param": null, "code": null}}'
    )
    page.route("**/v1/sessions", lambda route: route.fulfill(status=429, body=body))
    page.get_by_role("button", name="Generate").click()
    expect(problem).to_have_text("The queue is full. Try again in a moment.")
    page.unroute("**/v1/sessions")
    page.route("**/v1/sessions", lambda route: route.abort())
    page.get_by_role("button", name="Generate").click()
    expect(problem).to_have_text("The server does not answer. Is 'longspan serve' still running?")
    page.unroute("**/v1/sessions")
    page.get_by_role("spinbutton", name="top-p").fill("3")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#top-p:invalid")).to_be_focused()
    page.get_by_role("spinbutton", name="top-p").fill("0.9")
    generated(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_on_a_phone_a_tap_opens_the_token(start: Open) -> None:
    page = start(width=375, has_touch=True)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#said")).to_contain_text("finished")
    page.get_by_role("button", name="Fork").click()
    assert fits(page)
    token = page.locator("#text-1 .token").nth(4)
    token.tap()
    expect(page.locator("#token-title")).to_contain_text('Token "c"')
    expect(page.locator("#token-title")).to_be_in_viewport()
    expect(token).to_be_in_viewport()
    assert fits(page)
    page.locator("#token-close").click()
    expect(page.locator("#token.open")).to_have_count(0)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(start: Open, dark: bool) -> None:
    page = generated(start(dark=dark))
    assert contrast(page, "h1, h2, p, td, th, caption, label, select, strong, .soft, button:enabled") >= 4.5
    page.locator(".token").evaluate_all("all => all.forEach((t) => t.style.setProperty('--shade', '100%'))")
    page.locator(".heads td").evaluate_all("all => all.forEach((t) => t.style.setProperty('--part', '45%'))")
    assert contrast(page, ".token, .heads td") >= 4.5


def test_tabs_and_names_for_a_screen_reader(start: Open) -> None:
    page = start()
    tree = page.locator("body").aria_snapshot()
    for part in [
        'heading "longspan" [level=1]',
        'tablist "Views"',
        'tab "Write" [selected]',
        'tabpanel "Write"',
        'textbox "Prompt"',
        'button "Generate"',
        'combobox "model"',
        'spinbutton "temperature"',
        'spinbutton "top-p"',
        'spinbutton "top-k"',
        'spinbutton "seed"',
        'region "Sessions"',
        'button "Upload a session"',
    ]:
        assert part in tree, f"{part}\n{tree}"
    page.get_by_role("tab", name="Write").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Training")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Training")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Write")).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    expect(page.get_by_role("textbox", name="Prompt")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for name in ("Generate", "model"):
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_accessible_name(name)
