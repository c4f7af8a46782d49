"""How the page of `longspan serve` matches a text with its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

import longspan.serving
from tests.browser.conftest import Open

SOURCE = Path(longspan.serving.__file__).parent / "page" / "pieces.js"


@pytest.fixture
def page(open_page: Open, tmp_path: Path) -> Page:
    """A page with the functions of pieces.js."""
    script = SOURCE.read_text().replace("export ", "")
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><link rel='icon' href='data:,'><script>{script}</script>")
    return open_page(file.as_uri())


def called(page: Page, function: str, *arguments: Any) -> Any:
    return page.evaluate(f"{function}(...{json.dumps(arguments)})")


def tokens(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text, "bits": number + 1.0} for number, text in enumerate(texts)]


def test_a_prompt_becomes_tokens_and_generated_ones_keep_their_bits(page: Page) -> None:
    pieces = [{"text": "ab"}, {"text": "c", "bits": 0.5}]
    assert called(page, "inspected", pieces, "abc", tokens("a", "b", "c")) == [
        {"text": "a", "bits": 1.0, "look": 0},
        {"text": "b", "bits": 2.0, "look": 1},
        {"text": "c", "bits": 0.5, "look": 2},
    ]


def test_parts_of_a_character_are_one_piece(page: Page) -> None:
    found = called(page, "inspected", [{"text": "aüb"}], "aüb", tokens("a", "\\xc3", "\\xbc", "b"))
    assert found == [
        {"text": "a", "bits": 1.0, "look": 0},
        {"text": "ü", "bits": 5.0, "look": 2},
        {"text": "b", "bits": 4.0, "look": 3},
    ]


def test_a_backslash_in_the_text_is_only_text(page: Page) -> None:
    found = called(page, "inspected", [{"text": "\\xc3"}], "\\xc3", tokens("\\xc3"))
    assert found == [{"text": "\\xc3", "bits": 1.0, "look": 0}]


def test_tokens_that_are_cut_elsewhere(page: Page) -> None:
    """Generated as 'lo' + 'ng'; the tokenizer, asked again, says 'l' + 'ong'."""
    pieces = [{"text": "lo", "bits": 1.5}, {"text": "ng", "bits": 2.5}]
    found = called(page, "inspected", pieces, "long", tokens("l", "ong"))
    assert [(one["text"], one["bits"], one["look"]) for one in found] == [("lo", 1.5, 1), ("ng", 2.5, 1)]


def test_only_the_end_of_a_long_text_is_inspected(page: Page) -> None:
    assert called(page, "tail", "aüb", 2) == "b"
    assert called(page, "tail", "aüb", 3) == "üb"
    pieces = [{"text": "one "}, {"text": "two ", "bits": 3.0}, {"text": "abc"}, {"text": "d", "bits": 4.0}]
    found = called(page, "inspected", pieces, "bcd", tokens("b", "c", "d"))
    assert "".join(one["text"] for one in found) == "one two abcd"
    assert [one.get("look") for one in found] == [None, None, None, 0, 1, 2]
    assert [one.get("bits") for one in found] == [None, 3.0, None, 1.0, 2.0, 4.0]


def test_tokens_of_another_text_are_refused(page: Page) -> None:
    assert called(page, "inspected", [{"text": "Abc"}], "Abc", tokens("a", "b")) is None


def test_bits_of_tokens_without_text_belong_to_the_next_piece(page: Page) -> None:
    page.evaluate("() => { window.collect = collector(); }")
    marks = {"tokens": ["\\xc3"], "token_logprobs": [-0.6931471805599453], "top_logprobs": [{"\\xc3": -1}]}
    assert called(page, "collect", {"text": "", "logprobs": marks}) is None
    piece = called(page, "collect", {"text": "ü", "logprobs": marks})
    assert (piece["text"], piece["bits"], piece["tokens"]) == ("ü", pytest.approx(2.0), 2)
