"""A corpus from several files: globs, lists, `.jsonl` files and standard input."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.config import DataConfig
from longspan.data import corpora, prepare, standard_input
from longspan.data.corpus import SPLITS, Corpus
from longspan.errors import UserError
from longspan.home import home
from tests.abuse.workplace import RECIPE


def find(name: str, **options: object) -> Corpus:
    return corpora.find(name, lambda line: None, **options)


def text_of(corpus: Corpus) -> bytes:
    return b"".join(chunk for split in SPLITS for chunk in corpus.read(split))


def pieces(corpus: Corpus) -> dict[str, list[str]]:
    return {split: [piece.path.name for piece in corpus.splits[split]] for split in SPLITS}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a name that is full of special characters."""
    folder = tmp_path / "[old] books, *all?"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def texts(here: Path) -> Path:
    folder = here / "texts"
    (folder / "deep" / "er").mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"text {number}\n" * 9)
    (folder / "deep" / "er" / "x.txt").write_text("deep text\n" * 9)
    (folder / "notes.md").write_text("not this\n")
    (folder / ".hidden.txt").write_text("nor this\n")
    return folder


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# --- globs and lists


def test_a_glob_is_its_files_in_order_split_like_a_folder(texts):
    corpus = find("texts/*.txt")
    assert sorted(name for names in pieces(corpus).values() for name in names) == [
        f"{number:02}.txt" for number in range(40)
    ]
    assert all(names == sorted(names) for names in pieces(corpus).values())
    (texts / "notes.md").unlink()
    (texts / "deep" / "er" / "x.txt").unlink()
    assert pieces(corpus) == pieces(find("texts"))
    assert corpus.name == find("texts").name == "texts"


def test_two_stars_are_any_folders(texts):
    assert b"deep text" in text_of(find("texts/**/*.txt"))
    assert b"deep text" in text_of(find("texts/*/*/*.txt,texts/0*.txt"))
    with pytest.raises(UserError, match="no file matches"):
        find("texts/*/*.txt,texts/0*.txt")


def test_a_list_is_in_its_own_order_and_each_file_is_taken_once(texts):
    corpus = find("texts/07.txt,texts/0[12].txt,texts/07.txt")
    assert text_of(corpus) == b"text 7\n" * 9 + b"text 1\n" * 9 + b"text 2\n" * 9


def test_a_file_with_a_comma_or_a_star_in_its_name_is_that_file(here):
    (here / "a,b*.txt").write_text("one file\n" * 30)
    (here / "c.txt").write_text("another\n" * 30)
    assert text_of(find("a,b*.txt")) == b"one file\n" * 30
    assert text_of(find("a[,]b[*].txt,c.txt")) == b"one file\n" * 30 + b"another\n" * 30


@pytest.mark.parametrize(
    "word", ["texts/*.txt", "texts/**", "texts/01.txt,texts/02.txt", "~/0?.txt,texts/01.txt"]
)
def test_what_is_stored_is_valid_from_any_folder(texts, tmp_path, monkeypatch, word):
    monkeypatch.setenv("HOME", str(texts))
    before = find(word)
    stored = corpora.anchored(word)
    monkeypatch.chdir(tmp_path)
    after = find(stored)
    assert (after.splits, after.name) == (before.splits, before.name)
    assert corpora.anchored(stored) == stored


def test_files_called_train_valid_and_test_are_the_splits(here):
    for split in SPLITS:
        lines(here / f"{split}.jsonl", {"text": f"{split} text"})
    for corpus in (find("*.jsonl"), find("valid.jsonl,test.jsonl,train.jsonl"), find(".")):
        assert {split: b"".join(corpus.read(split)) for split in SPLITS} == {
            split: f"{split} text\n".encode() for split in SPLITS
        }
    (here / "valid.jsonl").unlink()
    with pytest.raises(UserError, match=r"has train.jsonl but no valid.jsonl: add what is missing"):
        find(".")


def test_compressed_files_are_unpacked(texts):
    for number in range(40):
        path = texts / f"{number:02}.txt"
        (texts / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    plain, packed = find("texts/??.txt"), find("texts/??.txt.gz")
    assert sorted(text_of(packed).splitlines()) == sorted(text_of(plain).splitlines())


def test_links_do_not_lead_out_of_a_glob(texts, tmp_path):
    (tmp_path / "secret.txt").write_text("secret\n" * 9)
    (texts / "deep" / "linked").symlink_to(tmp_path)
    assert b"secret" not in text_of(find("texts/**/*.txt"))
    (texts / "zz.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"zz.txt is a link to .*secret.txt, outside of .*texts: remove it"):
        find("texts/*.txt")
    (texts / "zz.txt").unlink()
    (texts / "zz.txt").symlink_to(texts / "00.txt")
    assert b"text 0" in text_of(find("texts/*.txt"))


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("texts/*.text", r"no file matches 'texts/\*.text'"),
        ("texts/00.txt,texts/nothing.txt", "there is no file texts/nothing.txt"),
        ("texts/00.txt,texts", r"texts is a folder: among several files, write 'texts/\*\*'"),
        ("texts/00.txt,,texts/01.txt", "has an empty entry"),
        ("texts/00.txt,", "has an empty entry"),
        ("texts/0?.txt,some.jsonl", r"stands for .jsonl and other files: give only one of the two"),
        ("empty-*", r"the files of 'empty-\*' are empty"),
        ("texts/*.txt,zeros", r"zeros is not text \(it has 64 NUL bytes\)"),
        ("texts/*.txt,packed.zst", "is compressed with zstd"),
        ("*", "."),
        (",".join(f"{number}.txt" for number in range(2000)), "there is no file 0.txt"),
    ],
)
def test_mistakes_are_one_line(texts, here, word, line):
    lines(here / "some.jsonl", {"text": "a"})
    (here / "zeros").write_bytes(bytes(64))
    (here / "packed.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(64))
    for name in ("empty-1", "empty-2"):
        (here / name).touch()
    with pytest.raises(UserError, match=line):
        find(word)


# --- JSON lines


def test_json_lines_are_their_texts(here):
    path = lines(here / "a.jsonl", {"text": "héllo"}, {"id": 2, "text": "two\nlines\n"}, {"text": ""})
    path.write_bytes(path.read_bytes() + b'\n{"text": "\\u20ac"}')
    assert text_of(find("a.jsonl")) == "héllo\ntwo\nlines\n€\n".encode()
    (here / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert text_of(find("b.jsonl.gz")) == text_of(find("a.jsonl"))


def test_another_field_is_another_text(here):
    lines(here / "a.jsonl", *({"text": f"text {i}", "title": f"title {i}"} for i in range(30)))
    config = DataConfig(corpus="a.jsonl")
    titles = DataConfig(corpus="a.jsonl", field="title")
    assert prepare(config).splits["train"].tokens[:6].tobytes() == b"text 0"
    assert prepare(titles).splits["train"].tokens[:7].tobytes() == b"title 0"
    assert prepare(config).fingerprint == prepare(DataConfig(corpus="a.jsonl", field="text")).fingerprint


def test_changed_lines_are_noticed(here):
    lines(here / "a.jsonl", *({"text": "before"} for _ in range(30)))
    before = prepare(DataConfig(corpus="a.jsonl")).fingerprint
    lines(here / "a.jsonl", *({"text": "after!"} for _ in range(30)))
    assert prepare(DataConfig(corpus="a.jsonl")).fingerprint != before


def test_a_folder_of_json_lines_is_read_by_its_field(here):
    (here / "folder").mkdir()
    for number in range(40):
        lines(here / "folder" / f"{number}.jsonl", {"text": f"text {number}"})
    assert b"{" not in text_of(find("folder"))
    (here / "folder" / "readme.txt").write_text("some words\n")
    with pytest.warns(UserWarning, match=r"40 .jsonl files in folder are read as plain text"):
        assert b"{" in text_of(find("folder"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "a"}\n{"text": ', r"line 2 of a.jsonl is not JSON: every line must be an object such as"),
        ('\n\n{"txt": "a"}', r"line 3 of a.jsonl has no field 'text' \(it has 'txt'\): choose one with"),
        ('"text"', r"line 1 of a.jsonl is not a JSON object such as {\"text\": \"...\"}"),
        ('{"text": ["a"]}', r"line 1 of a.jsonl has no text in the field 'text', but \[\"a\"\]"),
        ('{"text": ""}', "a.jsonl has no text in the field 'text'"),
        ("[" * 100_000, "line 1 of a.jsonl is not JSON"),
        ('{"text": "\\u0000"}', r"a.jsonl is not text \(it has 1 NUL bytes\)"),
    ],
)
def test_lines_that_are_not_right_are_named(here, content, line):
    (here / "a.jsonl").write_text(content)
    for _ in range(2):
        with pytest.raises(UserError, match=line):
            find("a.jsonl")


def test_a_line_without_end_is_refused(here, monkeypatch):
    monkeypatch.setattr("longspan.data.json_lines._LONGEST", 50)
    lines(here / "a.jsonl", {"text": "a"}, {"text": "a" * 50})
    with pytest.raises(UserError, match=r"line 2 of a.jsonl is longer than 50 bytes"):
        find("a.jsonl")


def test_a_field_without_json_lines_is_a_mistake(texts):
    with pytest.raises(UserError, match=r"texts/\*.txt has no .jsonl files: leave out data.field"):
        prepare(DataConfig(corpus="texts/*.txt", field="text"))
    with pytest.raises(ValueError, match="binary takes bytes as they are: leave out field"):
        DataConfig(corpus="texts/*.txt", field="text", binary=True)


def test_binary_takes_json_lines_as_they_are(here):
    path = lines(here / "a.jsonl", *({"text": "a"} for _ in range(30)))
    assert text_of(find("a.jsonl", binary=True)) == path.read_bytes()


def test_info_and_add_have_the_field(here, capsys):
    lines(here / "a.jsonl", *({"title": "héllo"} for _ in range(30)))
    assert main(["data", "info", "a.jsonl", "--field", "title", "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert sum(split["bytes"] for split in splits.values()) == 30 * 7
    assert main(["data", "add", "mine", "a.jsonl"]) == 1
    assert "line 1 of" in capsys.readouterr().err
    assert main(["data", "add", "mine", "a.jsonl", "--field", "title"]) == 0


# --- standard input


def give(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    monkeypatch.setattr(standard_input, "_stored", None)


def test_standard_input_is_stored(monkeypatch):
    give(monkeypatch, b"some words\n" * 30)
    assert text_of(find("-")) == b"some words\n" * 30
    stored = Path(corpora.anchored("-"))
    assert stored.read_bytes() == b"some words\n" * 30
    assert [*(home() / "stdin").iterdir()] == [stored]
    give(monkeypatch, b"some words\n" * 30)
    assert corpora.anchored("-") == str(stored)
    assert main(["data", "clean"]) == 0
    assert stored.is_file()  # it cannot be made again
    assert main(["data", "clean", "--stdin"]) == 0
    assert not stored.exists()


def test_standard_input_may_be_json_lines(monkeypatch):
    give(monkeypatch, b'{"title": "words"}\n' * 30)
    assert text_of(find("-", field="title")) == b"words\n" * 30
    assert text_of(find(corpora.anchored("-"), field="title")) == b"words\n" * 30


@pytest.mark.parametrize(
    ("text", "line"), [(b"", "standard input is empty"), (bytes(64), r"stdin-.*.txt is not text")]
)
def test_standard_input_without_text(monkeypatch, text, line):
    give(monkeypatch, text)
    with pytest.raises(UserError, match=line):
        find("-")


def test_standard_input_is_for_one_process(monkeypatch):
    give(monkeypatch, b"some words\n" * 30)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes cannot read one standard input"):
        find("-")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        find("-")


def test_a_run_on_standard_input_is_resumed_and_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    give(monkeypatch, b"the cat sat on the mat\n" * 60)
    assert main(["train", "tiny.toml", "--data", "-", "--out", "run"]) == 0
    give(monkeypatch, b"")
    assert main(["train", "--resume", "run", "--stage.0.steps", "6"]) == 0
    give(monkeypatch, b"the dog sat on the log\n" * 9)
    capsys.readouterr()
    assert main(["eval", "run", "--data", "-", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["split"], score["tokens"]) == ("whole", 23 * 9 - 1)


def test_a_run_on_a_glob_is_resumed_from_another_folder(texts, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "run")
    Path("tiny.toml").write_text(RECIPE)
    assert main(["train", "tiny.toml", "--data", "texts/*.txt", "--out", out]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", out, "--stage.0.steps", "6"]) == 0
    (texts / "new.txt").write_text("more\n")
    capsys.readouterr()
    assert main(["train", "--resume", out, "--stage.0.steps", "8"]) == 1
    assert "changed since" in capsys.readouterr().err


def test_a_run_on_a_field_is_scored_on_that_field_and_on_plain_text(here, capsys):
    Path("tiny.toml").write_text(RECIPE)
    lines(here / "a.jsonl", *({"title": f"title number {i}"} for i in range(90)))
    (here / "plain.txt").write_text("title\n" * 30)
    words = ["train", "tiny.toml", "--data", "a.jsonl", "--data.field", "title", "--out", "run"]
    assert main(words) == 0
    for data, tokens in (([], None), (["--data", "a.jsonl"], 1429), (["--data", "plain.txt"], 179)):
        capsys.readouterr()
        assert main(["eval", "run", "--json", *data]) == 0
        said = capsys.readouterr()
        assert "changed" not in said.err
        assert tokens in (None, json.loads(said.out)["tokens"])
