"""The tab Training of the page of `longspan serve`, and its dialog for an API key, against the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Open
from tests.browser.folders import append, spans_line, train_line, valid_line, written_run
from tests.browser.looks import fills, fits, ticks
from tests.browser.server import serving, trained_run

KEY = "a-secret-of-four-words"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    watched = written_run(place / "watched", "watched", search=False)
    small = trained_run(place)
    shutil.copytree(small, place / "other")
    words = (small, place / "other", "--watch", watched, "--sessions", place / "sessions")
    with serving(*words, key=KEY) as found:
        yield found


def entered(page: Page, key: str = KEY) -> Page:
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key", exact=True).fill(key)
    dialog.get_by_role("button", name="Continue").click()
    return page


@pytest.fixture
def training(address: str, open_page: Open, allowed: set[str]) -> Open:
    allowed.add("status of 401")

    def opened(**options: object) -> Page:
        page = entered(open_page(f"{address}#training", **options))  # type: ignore[arg-type]
        page.get_by_role("combobox", name="run", exact=True).select_option("watched")
        page.locator("#spans-heatmap g.mark-rect path").first.wait_for()
        return page

    return opened  # type: ignore[return-value]


def test_the_key_is_asked_for_once_and_forgotten(address: str, open_page: Open, allowed: set[str]) -> None:
    allowed.add("status of 401")
    page = open_page(address)
    expect(page.get_by_role("dialog", name="API key").get_by_label("Key", exact=True)).to_be_focused()
    entered(page, "wrong")
    expect(page.get_by_role("dialog")).to_contain_text("That key is not right")
    entered(page)
    expect(page.get_by_role("combobox", name="model")).to_have_value("small")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert KEY not in page.evaluate(
        "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
    )
    page.reload()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("#problem-text")).to_contain_text("needs its API key")


def test_charts_follow_the_run(training: Open, place: Path) -> None:
    page = training()  # type: ignore[call-arg]
    run = place / "watched"
    expect(page.locator("#run-progress")).to_contain_text("step 400 of 500")
    expect(page.locator("#spans-step")).to_have_text("step 400")
    assert ticks(page, "curve-bits_per_byte")[-1] == "400"
    before = fills(page, "spans-heatmap")
    chart = page.locator("#curve-loss svg")
    chart.evaluate("one => { one.dataset.same = 'yes'; }")
    append(run / "metrics.jsonl", *(train_line(step) for step in range(410, 501, 10)), valid_line(500))
    append(run / "spans.jsonl", spans_line(100) | {"step": 500})
    expect(page.locator("#run-progress")).to_contain_text("step 500 of 500")
    expect(page.locator("#spans-step")).to_have_text("step 500")
    expect(page.locator("#curve-bits_per_byte")).to_contain_text("500")
    assert fills(page, "spans-heatmap") != before
    expect(chart).to_have_attribute("data-same", "yes")  # new data, not a new chart


def test_a_hidden_tab_does_not_ask(training: Open) -> None:
    page = training()  # type: ignore[call-arg]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert len(asked) in (1, 2)  # one every two seconds
    page.get_by_role("tab", name="Write").click()
    page.wait_for_timeout(100)
    asked.clear()
    page.wait_for_timeout(2500)
    assert asked == []
    page.get_by_role("tab", name="Training").click()
    page.wait_for_timeout(500)
    assert len(asked) == 1


def test_another_run_and_its_samples(training: Open) -> None:
    page = training()  # type: ignore[call-arg]
    expect(page.locator("#samples-text")).to_have_text("text of step 400")
    page.get_by_role("combobox", name="run", exact=True).select_option("small")
    expect(page.locator("#run-progress")).to_contain_text("finished, 78 steps")
    expect(page.locator("#samples-text")).not_to_have_text("text of step 400")
    assert len(fills(page, "spans-heatmap")) == 2  # one layer of two heads


def test_on_a_phone_and_dark(training: Open) -> None:
    page = training(width=375, dark=True)  # type: ignore[call-arg]
    assert fits(page)
    label = page.locator("#curve-loss .role-axis-label text").first
    expect(label).to_have_attribute("fill", "#e6e9ee")
    page.emulate_media(color_scheme="light")
    expect(label).to_have_attribute("fill", "#1d2430")


def test_a_server_that_does_not_answer_is_said_once_and_asked_again(
    training: Open, allowed: set[str]
) -> None:
    allowed.add("ERR_FAILED")
    page = training()  # type: ignore[call-arg]
    problem = page.locator("#problem")

    def refuse(route: Route) -> None:
        route.abort()

    page.route("**/v1/runs/**", refuse)
    expect(problem).to_contain_text("The server does not answer.")
    page.unroute("**/v1/runs/**", refuse)
    expect(problem).to_be_hidden()


def test_one_of_two_models_writes(address: str, open_page: Open, allowed: set[str]) -> None:
    allowed.add("status of 401")
    page = entered(open_page(address))
    choice = page.get_by_role("combobox", name="model")
    expect(choice.locator("option")).to_have_text(["small", "other"])
    choice.select_option("other")
    page.get_by_text("Settings").click()
    page.get_by_role("spinbutton", name="max tokens").fill("5")
    page.get_by_role("button", name="Generate").click()  # without a prompt
    expect(page.locator("#said")).to_contain_text("Text 1: finished, 5 tokens")
    expect(page.locator("#session-list li").first).to_contain_text("other")
    page.get_by_role("spinbutton", name="max tokens").fill("999999")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#max-tokens:invalid")).to_be_focused()  # more than the server allows
