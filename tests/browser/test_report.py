"""The page of `longspan report` in a browser."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from longspan.inspection.report import write_report
from tests.browser.conftest import Open
from tests.browser.folders import HEADS, LAYERS, STEPS, append, written_run
from tests.browser.looks import contrast, fills, fits, ticks, until


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """one.html: a run; two.html: two runs."""
    folder = tmp_path_factory.mktemp("reports")
    one = written_run(folder / "one", "narrow")
    two = written_run(folder / "two", "wide", 128)
    write_report([one], folder / "one.html")
    write_report([one, two], folder / "two.html")
    return folder


def drawn(page: Page) -> Page:
    """After the last chart."""
    page.locator("#search-heatmap svg g.mark-rect path").first.wait_for()
    page.locator("#curve-tokens_per_second svg").wait_for()
    return page


def drag(page: Page, chart: str, begin: float, end: float) -> None:
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    plot = page.locator(f"#{chart} .root path.background").first
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], middle)
    page.mouse.down()
    for part in (0.3, 0.6, 1.0):
        page.mouse.move(box["x"] + (begin + part * (end - begin)) * box["width"], middle)
    page.mouse.up()


def test_dragging_zooms_all_curves_and_the_button_shows_all(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    whole = ticks(page, "curve-bits_per_byte")
    assert whole[-1] == "400"
    drag(page, "curve-loss", 0.25, 0.5)
    expect(page.locator("#curves-from")).to_have_value(re.compile(r"^(9|10|11)\d$"))
    expect(page.locator("#curves-to")).to_have_value(re.compile(r"^(19|20|21)\d$"))
    expect(page.locator("#curve-bits_per_byte")).to_contain_text("120")
    zoomed = [int(text) for text in ticks(page, "curve-bits_per_byte")]
    assert min(zoomed) >= 90
    assert max(zoomed) <= 219
    page.get_by_role("button", name="Show all").click()
    expect(page.locator("#curve-bits_per_byte")).to_contain_text("400")
    assert ticks(page, "curve-bits_per_byte") == whole


def test_zoom_and_axis_by_keyboard(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    page.get_by_role("spinbutton", name="from").focus()
    page.keyboard.type("200")
    page.keyboard.press("Tab")
    page.keyboard.type("300")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Show all")).to_be_focused()
    expect(page.locator("#curve-loss")).not_to_contain_text("400")
    assert min(int(text) for text in ticks(page, "curve-loss")) == 200
    page.get_by_role("combobox", name="over").select_option("tokens")
    expect(page.locator("#curve-loss")).to_contain_text("1,200,000")
    expect(page.locator("#curves-from")).to_have_value("")


@pytest.mark.parametrize("dark", [False, True])
def test_the_tooltip_says_what_is_under_the_pointer(pages: Path, open_page: Open, dark: bool) -> None:
    page = drawn(open_page((pages / "two.html").as_uri(), dark=dark))
    page.locator("#curve-loss").scroll_into_view_if_needed()
    tooltip = page.locator("#vg-tooltip-element")
    places = itertools.cycle([0.5, 0.52])

    def shown() -> bool:
        box = page.locator("#curve-loss .root path.background").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * next(places), box["y"] + box["height"] * 0.6)
        return tooltip.is_visible()

    until(page, shown)
    expect(tooltip).to_contain_text("loss (nats per token)")
    expect(tooltip).to_contain_text(re.compile(r"run:?\s*(1: narrow|2: wide)"))
    assert contrast(page, "#vg-tooltip-element td") >= 4.5


def test_the_slider_changes_spans_and_masks(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    slider = page.locator("#spans-slider")
    assert slider.input_value() == str(len(STEPS) - 1)
    expect(page.locator("#spans-step")).to_have_text("step 400")
    last = fills(page, "spans-heatmap")
    assert len(last) == LAYERS * HEADS
    assert len(set(last)) > HEADS
    areas = page.locator("#spans-masks g.mark-area.role-mark path")
    assert areas.count() == LAYERS * HEADS
    masks = areas.evaluate_all("all => all.map((one) => one.getAttribute('d'))")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#spans-step")).to_have_text("step 10")
    until(page, lambda: fills(page, "spans-heatmap") != last)
    first = fills(page, "spans-heatmap")
    assert all(a != b for a, b in zip(first, last, strict=True))
    assert areas.evaluate_all("all => all.map((one) => one.getAttribute('d'))") != masks
    page.keyboard.press("ArrowRight")
    expect(page.locator("#spans-step")).to_have_text("step 20")
    expect(slider).to_have_attribute("aria-valuetext", "step 20")


def test_a_search_plays_and_pauses(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    play = page.locator("#search-play")
    before = fills(page, "search-heatmap")
    assert len(set(before)) == 2  # decided: probabilities of 0 and 1
    play.press("Enter")
    expect(play).to_have_text("Pause")
    until(page, lambda: int(page.locator("#search-slider").input_value()) >= 2)
    play.press("Enter")
    expect(play).to_have_text("Play")
    at = page.locator("#search-slider").input_value()
    assert 2 <= int(at) < len(STEPS) - 1
    assert fills(page, "search-heatmap") != before
    page.wait_for_timeout(500)
    assert page.locator("#search-slider").input_value() == at
    expect(page.locator("#search-step")).to_contain_text("temperature 4.")


def test_playing_ends_at_the_last_moment(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    slider = page.locator("#samples-slider")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#samples-text")).to_have_text("text of step 100")
    page.locator("#samples-play").click()
    expect(page.locator("#samples-text")).to_have_text("text of step 400")
    expect(page.locator("#samples-play")).to_have_text("Play")


def test_several_runs_are_overlaid_and_compared(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "two.html").as_uri()))
    lines = page.locator("#curve-loss g.mark-line.role-mark path")
    colours = lines.evaluate_all("all => all.map((one) => one.getAttribute('stroke'))")
    assert len(colours) == 4  # training and valid of two runs
    assert len(set(colours)) == 2
    expect(page.locator("#curve-loss")).to_contain_text("2: wide")
    row = page.get_by_role("region", name="Differences").get_by_role("row", name="model.width")
    expect(row.get_by_role("cell")).to_have_text(["64", "128"])
    page.get_by_role("combobox", name="run").first.select_option("wide")
    expect(page.locator("#spans-step")).to_have_text("step 400")


def test_a_phone_scrolls_in_one_direction(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "two.html").as_uri(), width=375, has_touch=True))
    assert fits(page)
    page.locator("summary").last.click()
    assert fits(page)
    chart = page.locator("#curve-loss svg").bounding_box()
    assert chart is not None
    assert chart["x"] + chart["width"] <= 375


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(pages: Path, open_page: Open, dark: bool) -> None:
    page = drawn(open_page((pages / "two.html").as_uri(), dark=dark))
    assert contrast(page, "h1, h2, h3, p, td, th, label, button, select, output, figcaption, pre") >= 4.5
    ink = page.locator("#curve-loss .role-axis-label text").first.get_attribute("fill")
    assert ink == ("#e6e9ee" if dark else "#1d2430")


def test_a_change_of_the_scheme_is_followed(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    page.emulate_media(color_scheme="dark")
    label = page.locator("#curve-loss .role-axis-label text").first
    expect(label).to_have_attribute("fill", "#e6e9ee")
    expect(page.locator("#search-heatmap .role-axis-label text").first).to_have_attribute("fill", "#e6e9ee")


def test_names_for_a_screen_reader(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    tree = page.locator("body").aria_snapshot()
    for part in [
        'heading "narrow" [level=1]',
        'heading "Curves" [level=2]',
        'combobox "over"',
        'spinbutton "from"',
        'button "Show all"',
        'button "Play"',
        'slider "training"',
        'region "Mask curves"',
        'region "Summary"',
    ]:
        assert part in tree, tree
    assert re.search(r"loss \(nats per token\) over step\. narrow: from 5\.\d+ at 10 to 1\.\d+ at 400", tree)
    assert re.search(r"Spans at step 400, in tokens\. Layer 1: \d+, \d+, \d+, \d+\.", tree)


def test_a_hostile_run_is_only_text(tmp_path: Path, open_page: Open) -> None:
    hostile = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    folders = [written_run(tmp_path / "one", hostile), written_run(tmp_path / "two", "'\"&amp;{{x}}")]
    append(folders[0] / "samples.jsonl", {"step": 400, "text": hostile})
    write_report(folders, tmp_path / "page.html")
    alerts: list[str] = []
    page = open_page((tmp_path / "page.html").as_uri())
    page.on("dialog", lambda dialog: alerts.append(dialog.message))
    drawn(page)
    expect(page.locator("#samples-text")).to_have_text(hostile)
    expect(page.locator("#curve-loss")).to_contain_text("1: <img src=x")
    expect(page.get_by_role("combobox", name="run").first).to_contain_text(hostile)
    assert page.locator("main img[src]").count() == 0
    assert alerts == []


def test_the_tab_key_goes_through_the_controls_in_order(pages: Path, open_page: Open) -> None:
    page = drawn(open_page((pages / "one.html").as_uri()))
    found = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found.append(page.evaluate("document.activeElement.id"))
    order = ["curves-x", "curves-from", "curves-to", "curves-reset", "spans-play", "spans-slider"]
    order += ["search-play", "search-slider", "samples-play", "samples-slider", "samples-text"]
    assert [one for one in found if one in order][: len(order)] == order
    page.locator("#curves-reset").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
