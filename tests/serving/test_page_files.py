"""The files of the page: everything they name is served, and nothing in them needs a weaker policy."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from longspan.serving.http.page import files

ALL = sorted(files())
OWN = [name for name in ALL if "/" not in name or name.startswith("report/")]


class Elements(HTMLParser):
    """Elements with their attributes, and the text inside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.inline += data.strip()


def test_the_page_has_no_inline_script_or_style() -> None:
    for name in ("index.html", "report/sections.html"):
        page = Elements(files()[name].read_text())
        assert page.inline == ""
        names = {attribute for _, attributes in page.found for attribute in attributes}
        assert not [one for one in names if one == "style" or one.startswith("on")]


def test_every_control_has_a_label() -> None:
    for name in ("index.html", "report/sections.html"):
        page = Elements(files()[name].read_text())
        labels = {attributes["for"] for tag, attributes in page.found if tag == "label"}
        controls = {a["id"] for tag, a in page.found if tag in ("input", "select", "textarea")}
        assert controls == labels


@pytest.mark.parametrize("name", OWN)
def test_what_a_file_names_is_served(name: str) -> None:
    text = files()[name].read_text()
    named = set(re.findall(r"""["'`]/page/([\w./-]+)["'`]""", text))
    named |= set(re.findall(r"""from "\./([\w.-]+)";""", text))
    assert named <= set(ALL)
    assert not re.findall(r"https?://(?!www\.w3\.org/|vega\.github\.io/schema/)", text)
    if name == "index.html":
        assert named == {"report/page.css", "page.css", "report/tokens.js", "main.js"}


def test_scripts_do_not_make_code_of_text() -> None:
    for name in OWN:
        text = files()[name].read_text()
        assert not re.search(r"\beval\(|new Function|document\.write|insertAdjacentHTML", text), name
        if "innerHTML" in text:  # only for a file of the page itself
            assert name == "training.js"
            assert text.count("innerHTML") == 1
