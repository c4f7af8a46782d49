"""What notebooks show: escaped, with nothing to load, and small for long texts."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longspan import LoadedModel, Run, load
from longspan.inspection.display import Spans, facts_html, text_html

from .tiny import run_folder


class Page(HTMLParser):
    """The elements and the text of some HTML, which must be well formed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def styles(self, tag: str) -> list[str]:
        return [attributes.get("style") or "" for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(run_folder(tmp_path_factory.mktemp("display") / "run <b>").path)


def test_a_score_is_the_text_shaded_by_surprise(lm: LoadedModel) -> None:
    text = "a<b> & grüße\n\x1b[31m"
    score = lm.score(text)
    page = Page(score._repr_html_())
    assert text.replace("\x1b", "\\x1b") in page.text
    assert f"{len(text.encode()):,} bytes, {score.bits_per_byte:.4f} bits per byte" in page.text
    letters = [attributes for tag, attributes in page.elements if tag == "span"]
    assert len(letters) == len(text)  # a letter of two bytes is shown whole
    bits = [nats / math.log(2) for nats in score.token_nats]
    assert letters[0]["title"] == f"{bits[0]:.2f} bits"
    place = text.index("ü")
    assert letters[place]["title"] == f"{bits[place] + bits[place + 1]:.2f} bits"
    alphas = [float(re.findall(r"([\d.]+)\)", style)[0]) for style in page.styles("span")]
    assert alphas[0] == pytest.approx(0.75 * bits[0] / 12, abs=0.006)


def test_nothing_is_loaded_and_colours_are_those_of_the_page(lm: LoadedModel) -> None:
    for shown in (lm, lm.score("abc"), lm.spans()):
        source = shown._repr_html_()  # type: ignore[union-attr]
        assert not re.search(r"https?:|src=|href=|<script|<style|url\(", source)
        assert not re.search(r"(?<!-)color:(?!inherit)", source)  # dark text on a dark page
        assert "background:#" not in source


def test_a_long_text_is_cut_with_a_note(lm: LoadedModel) -> None:
    source = lm.score("x" * 3000)._repr_html_()
    assert "... and 2,000 more tokens, which are not shown" in source
    assert len(source) < 150_000
    assert Page(source).text.count("x") == 1000


def test_plain_text_is_short_too(lm: LoadedModel) -> None:
    assert re.fullmatch(
        r"<TextScore: 3,000 tokens, 3,000 bytes, \d\.\d{4} bits per byte>", repr(lm.score("x" * 3000))
    )
    assert repr(lm) == f"LoadedModel('{lm.path}')"


def test_infinite_bits_and_broken_characters() -> None:
    page = Page(text_html([b"\xe2", b"\x82", b"<"], [1.0, math.inf, math.nan], "note"))
    assert page.text == "note\ufffd<"
    assert all("0.75" in style for style in page.styles("span"))


def test_spans_are_lists_and_a_heat_table(lm: LoadedModel) -> None:
    spans = lm.spans()
    assert spans == [[10.0, 10.0], [10.0, 10.0]]
    assert spans is not None
    assert json.loads(json.dumps(spans)) == copy.deepcopy(spans) == spans
    assert spans.limit == 12
    page = Page(Spans([[1.0, 16.0], [4.0]], 16)._repr_html_())
    shades = [re.findall(r"rgba\(\d+,\d+,\d+,([\d.]+)\)", style)[0] for style in page.styles("td")]
    assert shades == ["0.00", "0.75", "0.38"]
    assert "limit 16" in page.text
    large = Spans([[5.0] * 40] * 60, 16)._repr_html_()
    assert "... and 12 more layers, 8 more heads" in large
    assert Page(Spans([], 16)._repr_html_())


def test_a_model_says_what_it_is(lm: LoadedModel) -> None:
    source = lm._repr_html_()
    page = Page(source)
    assert "run <b>" in page.text
    assert "byte, vocabulary 256" in page.text
    assert "adaptive-span" in page.text
    assert "Spans in tokens (limit 12)" in page.text
    assert not [tag for tag, _ in page.elements if tag == "script"]
    assert "<i>" in Page(facts_html("x", [("a", "<i>\x07")])).text


def test_a_run_shows_its_scores(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert "finishedno" in Page(Run(folder)._repr_html_()).text
    line = {"kind": "final", "step": 3, "valid": {"bits_per_byte": 1.25}, "test": {"bits_per_byte": 1.5}}
    folder.metrics.write_text(json.dumps(line) + "\n")
    assert "test, bits per byte1.5000" in Page(Run(folder)._repr_html_()).text
