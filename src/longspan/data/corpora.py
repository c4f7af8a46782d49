"""Corpora by name, and any file or folder of text.

The checksums are those of the archives as first published; every mirror must match them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from longspan.data import local, registry
from longspan.data.corpus import Corpus, Form, Piece
from longspan.data.download import Archive, Progress, unpacked
from longspan.errors import UserError, nearest
from longspan.home import home

_WIKITEXT_SPLITS = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_HELD_OUT_BYTES = 5_000_000  # of enwik8 and text8, for valid and for test

ENWIK8 = Archive(
    name="enwik8.zip",
    checksum="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    urls=("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
    members={"enwik8": "enwik8"},
)
TEXT8 = Archive(
    name="text8.zip",
    checksum="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    urls=("https://mattmahoney.net/dc/text8.zip", "https://data.deepai.org/text8.zip"),
    members={"text8": "text8"},
)
WIKITEXT_2 = Archive(
    name="wikitext-2-v1.zip",
    checksum="md5:542ccefacc6c27f945fb54453812b3cd",
    urls=(
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
    ),
    members={f"wikitext-2/{name}": name for name in _WIKITEXT_SPLITS.values()},
)
WIKITEXT_103 = Archive(
    name="wikitext-103-v1.zip",
    checksum="md5:9ddaacaf6af0710eda8c456decff7832",
    urls=(
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
    ),
    members={f"wikitext-103/{name}": name for name in _WIKITEXT_SPLITS.values()},
)


@dataclass(frozen=True)
class Named:
    """A corpus that comes with the package."""

    about: str
    load: Callable[[Progress], Corpus]
    archive: Archive | None = None


def _downloaded(name: str, about: str, archive: Archive, splits: Callable[[str, Path], Corpus]) -> Named:
    return Named(
        about,
        lambda progress: splits(name, unpacked(archive, folder_of(name), home() / "downloads", progress)),
        archive,
    )


def _by_bytes(form: Form) -> Callable[[str, Path], Corpus]:
    """One file; its last bytes are held out, the usual split."""

    def splits(name: str, folder: Path) -> Corpus:
        path = folder / name
        size = path.stat().st_size
        cuts = (0, size - 2 * _HELD_OUT_BYTES, size - _HELD_OUT_BYTES, size)
        train, valid, test = ((Piece(path, start, stop),) for start, stop in pairwise(cuts))
        return Corpus(name, {"train": train, "valid": valid, "test": test}, form)

    return splits


def _wikitext(name: str, folder: Path) -> Corpus:
    return Corpus(name, {split: (Piece.whole(folder / file),) for split, file in _WIKITEXT_SPLITS.items()})


NAMED = {
    "python": Named(
        "the sources of Python's standard library on this machine", lambda progress: local.python_sources()
    ),
    "enwik8": _downloaded(
        "enwik8", "the first 100 MB of an English Wikipedia dump of 2006", ENWIK8, _by_bytes("bytes")
    ),
    "text8": _downloaded(
        "text8", "100 MB of English Wikipedia, only letters and blanks", TEXT8, _by_bytes("letters")
    ),
    "wikitext-2": _downloaded(
        "wikitext-2", "good Wikipedia articles, 2 million words, rare ones <unk>", WIKITEXT_2, _wikitext
    ),
    "wikitext-103": _downloaded(
        "wikitext-103", "good Wikipedia articles, 103 million words, rare ones <unk>", WIKITEXT_103, _wikitext
    ),
}


def folder_of(name: str) -> Path:
    """The folder of a downloaded corpus."""
    return home() / "corpora" / name


def find(name_or_path: str, progress: Progress) -> Corpus:
    """The corpus with this name (downloaded if needed), or the text in this file or folder."""
    if not name_or_path:  # as a path it would be the current folder
        raise UserError("the name of the corpus is empty: give a named corpus, a text file or a folder")
    if name_or_path in NAMED:
        return NAMED[name_or_path].load(progress)
    added = registry.registered()
    if name_or_path in added:
        return replace(local.from_path(added[name_or_path]), name=name_or_path)
    path = Path(name_or_path).expanduser()
    if path.exists() or path.suffix or path.name != name_or_path:  # it looks like a path, not like a name
        return local.from_path(path)
    hint = nearest(name_or_path, [*NAMED, *added])
    raise UserError(
        f"there is no corpus, file or folder '{name_or_path}'{hint} ('longspan data list' lists them)"
    )


def add(name: str, place: Path) -> Path:
    """Give a file or folder of text a name."""
    place = place.expanduser().absolute()
    if name in NAMED:
        raise UserError(f"'{name}' is a corpus that comes with longspan: choose another name")
    if not name or "/" in name or Path(name).exists():
        raise UserError(f"'{name}' looks like a path: choose a name such as 'novels'")
    local.from_path(place)  # errors appear now, not when a training starts
    registry.register(name, place)
    return place
