"""Links between the pages: every file they point to is there, with the heading, and results agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/records/**/README.md")]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for target, heading in re.findall(
        r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    ):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not heading or heading in headings(there), f"{target}#{heading}"


def rows(page: Path) -> set[tuple[str, str, str]]:
    """Value, unit and record of every row of results."""
    found = re.findall(
        r"\| ([\d.,]+k?) \| ([^|]+) \| \[([^\]]+)\]\([^)]+\) \|$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert found
    return {*found}


def test_the_results_of_the_readme_are_those_of_the_page_of_results() -> None:
    assert rows(ROOT / "README.md") <= rows(ROOT / "docs" / "results.md")
