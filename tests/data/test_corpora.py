from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import os
import sysconfig
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cli import main
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import corpora, local, prepare, splitting
from longspan.data.corpus import SPLITS, Corpus, Piece
from longspan.data.download import Archive, unpacked
from longspan.errors import UserError
from longspan.home import home


def find(name: str) -> Corpus:
    return corpora.find(name, lambda line: None)


def text_of(corpus: Corpus, split: str) -> bytes:
    return b"".join(corpus.read(split))


def files_of(corpus: Corpus, split: str) -> list[Path]:
    return [piece.path for piece in corpus.splits[split]]


# --- the standard library


def test_python_is_the_standard_library_split_by_file():
    corpus = find("python")
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = {split: files_of(corpus, split) for split in SPLITS}
    every = [path for split in SPLITS for path in files[split]]
    assert len(every) == len(set(every))
    assert stdlib / "json" / "decoder.py" in every
    assert all(path.suffix == ".py" and path.is_relative_to(stdlib) for path in every)
    assert not any({"site-packages", "dist-packages", "__pycache__"} & set(path.parts) for path in every)
    for split in SPLITS:
        names = [path.relative_to(stdlib).as_posix() for path in files[split]]
        assert names == sorted(names)
    shares = {split: len(files[split]) / len(every) for split in SPLITS}
    assert shares["train"] == pytest.approx(0.90, abs=0.03)
    assert shares["valid"] == pytest.approx(0.05, abs=0.02)
    assert shares["test"] == pytest.approx(0.05, abs=0.02)


def test_the_split_of_a_file_does_not_depend_on_the_others(tmp_path):
    for i in range(120):
        (tmp_path / f"{i:03}.txt").write_text(f"file {i}\n")
    before = find(str(tmp_path))
    (tmp_path / "000a.txt").write_text("newcomer\n")
    (tmp_path / "119.txt").unlink()
    after = find(str(tmp_path))
    for split in SPLITS:
        kept = [path for path in files_of(before, split) if path.name != "119.txt"]
        assert [path for path in files_of(after, split) if path.name != "000a.txt"] == kept


# --- files and folders


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4))
def test_cutting_by_position_loses_and_repeats_nothing(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("cut")
    pieces = []
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)
        pieces.append(Piece.whole(folder / str(number)))
    if sum(map(len, contents)) < 3:
        with pytest.raises(UserError, match="too little text"):
            splitting.by_position("this", pieces)
        return
    try:
        splits = splitting.by_position("this", pieces)
    except UserError:
        assert sum(map(len, contents)) < 20
        return
    read = [p.path.read_bytes()[p.start : p.stop] for split in SPLITS for p in splits[split]]
    assert b"".join(read) == b"".join(contents)
    assert all(splits.values())


def test_a_file_is_cut_at_ends_of_lines(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("".join(f"line {i} of this file\n" for i in range(1000)))
    corpus = find(str(path))
    assert corpus.name == "novel"
    whole = path.read_bytes()
    texts = {split: text_of(corpus, split) for split in SPLITS}
    assert b"".join(texts.values()) == whole
    assert all(text.endswith(b"\n") for text in texts.values())
    assert len(texts["train"]) == pytest.approx(0.90 * len(whole), abs=30)
    assert len(texts["valid"]) == pytest.approx(0.05 * len(whole), abs=30)


def test_a_file_without_lines_is_cut_between_characters(tmp_path):
    path = tmp_path / "one-line.txt"
    path.write_text("東" * 1000)
    for split in SPLITS:
        assert set(text_of(find(str(path)), split).decode()) == {"東"}


def test_few_files_are_cut_like_one(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(100)))
    corpus = find(str(tmp_path))
    whole = b"".join((tmp_path / f"{name}.txt").read_bytes() for name in "abc")
    assert b"".join(text_of(corpus, split) for split in SPLITS) == whole


def test_files_follow_each_other_on_lines_of_their_own(tmp_path):
    (tmp_path / "a").write_bytes(b"no newline")
    (tmp_path / "b").write_bytes(b"newline\n")
    (tmp_path / "c").write_bytes(b"end")
    pieces = tuple(Piece.whole(tmp_path / name) for name in "abc")
    corpus = Corpus("joined", {"train": pieces})
    for chunk_bytes in (1, 4, 100):
        assert b"".join(corpus.read("train", chunk_bytes)) == b"no newline\nnewline\nend"


def test_a_folder_skips_what_is_hidden_binary_or_empty(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "text.md").write_text("words and more words\n" * 50)
    corpus = find(str(tmp_path))
    assert {path.name for split in SPLITS for path in files_of(corpus, split)} == {"text.md"}


def test_a_folder_with_its_own_splits_keeps_them(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(split)
    corpus = find(str(tmp_path))
    assert [text_of(corpus, split) for split in SPLITS] == [b"train", b"valid", b"test"]
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(UserError, match=r"has train.txt but no valid.txt"):
        find(str(tmp_path))


def test_bad_places_are_one_clear_line(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "tiny.txt").write_text("ab")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"empty.txt is empty: there is no text to train on"):
        find(str(tmp_path / "empty.txt"))
    with pytest.raises(UserError, match="only 2 bytes: too little text"):
        find(str(tmp_path / "tiny.txt"))
    with pytest.raises(UserError, match="nothing has no text files"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="there is no corpus, file or folder 'enwik9'; did you mean 'enwik8'"):
        find("enwik9")


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a line of text\n" * 100)
    monkeypatch.chdir(tmp_path)
    assert find(".").name == tmp_path.name
    with pytest.raises(UserError, match="the name of the corpus is empty"):
        find("")


def test_a_pipe_is_no_plain_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        find(str(tmp_path / "pipe"))


def test_links_to_folders_are_not_followed(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_text("a line of text\n" * 100)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "texts").symlink_to(tmp_path / "texts")
    with pytest.raises(UserError, match=r"has no text files \(links to folders are not followed"):
        find(str(tmp_path / "links"))


# --- names of one's own


@pytest.mark.parametrize("place", ["text8.txt", "./text8s", "corpora/text8"])
def test_a_path_is_not_taken_for_a_misspelt_name(place):
    with pytest.raises(UserError, match=f"^there is no file or folder {Path(place)}$"):
        find(place)
    with pytest.raises(UserError, match="'text8s'; did you mean 'text8'"):
        find("text8s")


def test_an_added_name_stands_for_its_place(tmp_path):
    (tmp_path / "mine.txt").write_text("a line of text\n" * 100)
    corpora.add("mine", tmp_path / "mine.txt")
    corpus = find("mine")
    assert corpus.name == "mine"
    assert corpus.splits == local.from_file(tmp_path / "mine.txt").splits
    corpora.add("mine", tmp_path / "mine.txt")  # again: nothing changes
    (tmp_path / "other.txt").write_text("another text\n" * 100)
    with pytest.raises(UserError, match=r"'mine' is already used for .*mine.txt"):
        corpora.add("mine", tmp_path / "other.txt")
    assert find("mine").splits == corpus.splits
    (tmp_path / "mine.txt").unlink()
    with pytest.raises(UserError, match=r"there is no file or folder .*mine.txt"):
        find("mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [("enwik8", "comes with longspan"), ("a/b", "looks like a path"), ("", "looks like a path")],
)
def test_names_that_cannot_be_added(tmp_path, name, message):
    (tmp_path / "mine.txt").write_text("a line of text\n" * 100)
    with pytest.raises(UserError, match=message):
        corpora.add(name, tmp_path / "mine.txt")


def test_what_cannot_be_read_is_not_added(tmp_path):
    with pytest.raises(UserError, match="there is no file or folder"):
        corpora.add("mine", tmp_path / "missing.txt")
    assert not (home() / "corpora.json").exists()


# --- links out of a folder


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "secret").write_text("a password\n" * 100)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("a line of text\n" * 100)
    return tmp_path / "secret"


@pytest.mark.parametrize("target", ["/secret", "relative"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, secret, target):
    link = tmp_path / "notes" / "more.txt"
    link.symlink_to(secret if target == "/secret" else "../secret")
    with pytest.raises(
        UserError, match=rf"^{link} is a link to {secret}, outside the folder: .*--follow-links"
    ):
        find(str(tmp_path / "notes"))


def test_a_split_that_is_a_link_out_of_the_folder_is_refused(tmp_path, secret):
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "notes" / name).write_text("text\n")
    (tmp_path / "notes" / "test.txt").symlink_to(secret)
    with pytest.raises(UserError, match=r"test\.txt is a link to .*secret"):
        find(str(tmp_path / "notes"))


def test_links_within_the_folder_are_read(tmp_path, secret):
    (tmp_path / "notes" / "again.txt").symlink_to("mine.txt")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "notes")
    for folder in ("notes", "elsewhere"):
        assert sum(map(find(str(tmp_path / folder)).size, SPLITS)) == 2 * 1500


def test_a_name_can_allow_links(tmp_path, secret, capsys):
    (tmp_path / "notes" / "more.txt").symlink_to(secret)
    assert main(["data", "add", "notes", str(tmp_path / "notes")]) != 0
    assert "more.txt is a link" in capsys.readouterr().err
    assert main(["data", "add", "notes", str(tmp_path / "notes"), "--follow-links"]) == 0
    assert sum(map(find("notes").size, SPLITS)) == 1500 + 1100
    corpora.add("secret", secret)  # another name leaves it as it is
    assert sum(map(find("notes").size, SPLITS)) == 1500 + 1100
    with pytest.raises(UserError, match="is a link"):
        find(str(tmp_path / "notes"))


# --- downloads


def zipped(**files: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zip_file:
        for name, content in files.items():
            zip_file.writestr(f"inside/{name}", content)
    return archive.getvalue()


GOOD = zipped(text=b"the text")


SERVED = {"/good.zip": GOOD, "/bad.zip": b"an error page"}


class Mirrors(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        content = SERVED.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def mirrors() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (Mirrors,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
        server.shutdown()


def tarred(**files: bytes) -> bytes:
    """As in the archive of the Penn Treebank: gzipped, with ./ before every path."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar_file:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"./simple-examples/data/{name}")
            entry.size = len(content)
            tar_file.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def archive_at(*urls: str) -> Archive:
    checksum = f"sha256:{hashlib.sha256(GOOD).hexdigest()}"
    return Archive("corpus.zip", checksum, urls, {"inside/text": "text"})


def test_mirrors_are_tried_in_turn_until_one_has_the_right_file(tmp_path, mirrors):
    url, asked = mirrors
    archive = archive_at(*(f"{url}/{name}.zip" for name in ("missing", "bad", "good")))
    lines: list[str] = []
    folder = unpacked(archive, tmp_path / "corpus", tmp_path / "downloads", lines.append)
    assert (folder / "text").read_bytes() == b"the text"
    assert asked == ["/missing.zip", "/bad.zip", "/good.zip"]
    assert sum(line.startswith("download failed: ") for line in lines) == 2
    assert [line for line in lines if line.startswith("downloading ")] == [
        f"downloading {url}/{name}.zip" for name in ("missing", "bad", "good")
    ]
    unpacked(archive, tmp_path / "corpus", tmp_path / "downloads", lines.append)
    assert len(asked) == 3  # the second time nothing is asked


def nowhere(archive: Archive) -> Archive:
    """The same without a mirror that a test could reach."""

    class Unreachable(Archive):
        mirrors = ("http://127.0.0.1:9/corpus.zip",)

    return Unreachable(archive.name, archive.checksum, archive.urls, archive.members)


def test_without_network_the_error_says_what_to_get_and_where_to_put_it(tmp_path):
    archive = nowhere(archive_at("https://example.org/corpus.zip"))
    with pytest.raises(UserError) as caught:
        unpacked(archive, tmp_path / "corpus", tmp_path / "downloads", lambda line: None)
    assert "get it from https://example.org/corpus.zip" in str(caught.value)
    assert str(tmp_path / "downloads" / "corpus.zip") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "corpus").exists()


def test_a_file_put_there_by_hand_is_checked_and_used(tmp_path):
    archive = nowhere(archive_at("https://example.org/corpus.zip"))
    (tmp_path / "downloads").mkdir()
    by_hand = tmp_path / "downloads" / "corpus.zip"
    by_hand.write_bytes(GOOD[:-1])
    with pytest.raises(UserError, match=r"corpus.zip is damaged or a different file"):
        unpacked(archive, tmp_path / "corpus", tmp_path / "downloads", lambda line: None)
    assert by_hand.read_bytes() == GOOD[:-1]  # it is theirs: not deleted, not overwritten
    by_hand.write_bytes(GOOD)
    folder = unpacked(archive, tmp_path / "corpus", tmp_path / "downloads", lambda line: None)
    assert (folder / "text").read_bytes() == b"the text"


def test_enwik8_holds_out_its_last_bytes():
    folder = corpora.folder_of("enwik8")
    folder.mkdir(parents=True)
    with (folder / "enwik8").open("wb") as file:
        file.truncate(100_000_000)  # sparse: no bytes are written
    corpus = find("enwik8")
    assert [corpus.size(split) for split in SPLITS] == [90_000_000, 5_000_000, 5_000_000]
    starts = [corpus.splits[split][0].start for split in SPLITS]
    assert (starts, corpus.form) == ([0, 90_000_000, 95_000_000], "bytes")


def test_wikitext_has_its_own_splits():
    folder = corpora.folder_of("wikitext-2")
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"wiki.{split}.tokens").write_text(f"{split} words\n")
    assert text_of(find("wikitext-2"), "valid") == b"valid words\n"


PENN = {
    "ptb.train.txt": b" no it was n't <unk> \n aer <unk> N million \n",
    "ptb.valid.txt": b" no it was \n",
    "ptb.test.txt": b" it was n't aer \n",
    "ptb.char.train.txt": b" n o \n",
}


def test_the_penn_treebank_is_downloaded_and_has_its_own_splits(monkeypatch, mirrors):
    url, asked = mirrors
    content = tarred(**PENN)
    monkeypatch.setitem(SERVED, "/penn.tgz", content)
    checksum = f"md5:{hashlib.md5(content).hexdigest()}"
    archive = dataclasses.replace(corpora.PTB, checksum=checksum, urls=(f"{url}/penn.tgz",))
    monkeypatch.setitem(corpora.ARCHIVES, "ptb", archive)
    corpus = find("ptb")
    assert (corpus.name, corpus.form, asked) == ("ptb", "words", ["/penn.tgz"])
    for split in SPLITS:
        assert text_of(corpus, split) == PENN[f"ptb.{split}.txt"]
    assert sorted(path.name for path in corpora.folder_of("ptb").iterdir()) == sorted(
        [*[*PENN][:3], "unpacked.json"]
    )
    find("ptb")
    assert asked == ["/penn.tgz"]  # the second time nothing is asked


@pytest.mark.parametrize("kind", ["word", "transformer-xl", "sha-rnn"])
def test_words_of_the_penn_treebank_and_eos_at_every_line(kind):
    folder = corpora.folder_of("ptb")
    folder.mkdir(parents=True)
    for name, content in PENN.items():
        (folder / name).write_bytes(content)
    prepared = prepare(DataConfig(corpus="ptb", tokenizer=TokenizerConfig(kind=kind)))
    assert [len(prepared.splits[split]) for split in SPLITS] == [11, 4, 5]
    assert prepared.tokenizer.vocabulary_size == 9  # eight words and <eos>
    assert prepared.splits["valid"].tokens[-1] == prepared.tokenizer.encode("\n")[0]


def test_without_network_the_penn_treebank_says_what_to_get(monkeypatch):
    monkeypatch.setitem(corpora.ARCHIVES, "ptb", nowhere(corpora.PTB))
    with pytest.raises(UserError) as caught:
        find("ptb")
    assert str(caught.value) == (
        "could not download simple-examples.tgz: get it from "
        "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz or elsewhere and put it at "
        f"{home() / 'downloads' / 'simple-examples.tgz'}"
    )


def test_files_by_hand_must_all_be_there():
    folder = corpora.folder_of("ptb")
    folder.mkdir(parents=True)
    (folder / "ptb.train.txt").write_bytes(PENN["ptb.train.txt"])
    with pytest.raises(UserError, match=r"ptb has no ptb.valid.txt or ptb.test.txt: add what is missing"):
        find("ptb")


def test_every_download_has_a_checksum_and_several_mirrors():
    archives = corpora.ARCHIVES
    assert set(archives) == {"enwik8", "text8", "wikitext-2", "wikitext-103", "ptb"}
    for archive in archives.values():
        algorithm, _, digest = archive.checksum.partition(":")
        assert len(digest) == {"sha256": 64, "md5": 32}[algorithm]
        assert len(archive.mirrors) >= 3
