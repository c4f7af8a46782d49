"""`longspan data` as a user types it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from longspan.cli import data
from longspan.data import corpora
from longspan.data.corpus import SPLITS
from longspan.errors import UserError


def run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    data.register(parser.add_subparsers())
    args = parser.parse_args(["data", *words])
    args.run(args)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("ab" * 500)
    return path


def test_list_shows_every_name_and_what_is_here(text, capsys):
    corpora.folder_of("text8").mkdir(parents=True)
    run("add", "mine", str(text))
    assert capsys.readouterr().out == f"'mine' now stands for {text}\n"
    run("list")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    ends = {line.split()[0]: re.split(r"\s{2,}", line)[-1] for line in lines[2:]}
    assert ends == {
        "python": "on this machine",
        "enwik8": "not downloaded",
        "text8": str(corpora.folder_of("text8")),
        "wikitext-2": "not downloaded",
        "wikitext-103": "not downloaded",
        "ptb": "not downloaded",
        "mine": str(text),
    }


def test_brackets_in_a_path_are_shown_as_they_are(tmp_path, capsys):
    places = [tmp_path / "[old] books", tmp_path / "[", tmp_path / "b[" / "b]"]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        (place / "text").write_text("ab" * 500)
        run("add", f"name{number}", str(place))
    capsys.readouterr()
    run("list")
    shown = capsys.readouterr().out
    assert all(str(place) in shown for place in places)


def test_get_tells_what_is_there(text, capsys):
    run("get", str(text))
    assert capsys.readouterr().out == "mine is ready: train 900, valid 50, test 50 bytes\n"


def test_info_measures_each_split(text, capsys):
    run("info", str(text), "--tokenizer", "character", "--order", "first-seen")
    shown = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    assert ["train", "900", "900", "2", "900", "1.000"] in rows
    assert ["valid", "50", "50", "2", "50", "1.000"] in rows
    assert "mine: character tokens, vocabulary 2" in shown


def test_a_token_that_never_changes_has_no_bits(tmp_path, capsys):
    (tmp_path / "same.txt").write_text("a" * 100)
    run("info", str(tmp_path / "same.txt"))
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows if row[0] in SPLITS] == ["0.000"] * 3


def test_info_checks_the_token_files(text):
    run("info", str(text))
    for path in (Path(corpora.home()) / "tokens").rglob("test.tokens"):
        path.write_bytes(b"x" * 50)
    with pytest.raises(UserError, match=r"test.tokens is damaged"):
        run("info", str(text))


def test_mistakes_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="there is no corpus, file or folder 'nothing'"):
        run("info", "nothing")
    with pytest.raises(UserError, match="the name of the corpus is empty"):
        run("info", "")
    with pytest.raises(UserError, match="PATH is empty"):
        run("add", "mine", "")
    with pytest.raises(UserError, match="needs a vocabulary_size"):
        run("info", "python", "--tokenizer", "bpe")
    with pytest.raises(UserError, match="comes with longspan"):
        run("add", "python", str(tmp_path))
