"""Corpora by name, and any files or folder of text.

The checksums are those of the archives as first published; every mirror must match them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from longspan.data import local, named_paths, patterns, standard_input
from longspan.data.corpus import Corpus, Form, Piece
from longspan.data.download import Archive, Progress, unpacked
from longspan.errors import UserError, nearest
from longspan.home import expanded, home
from longspan.progress import Task, told
from longspan.registry import CORPORA

_WIKITEXT_SPLITS = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_PTB_SPLITS = {"train": "ptb.train.txt", "valid": "ptb.valid.txt", "test": "ptb.test.txt"}
_HELD_OUT_BYTES = 5_000_000  # of enwik8 and text8, for valid and for test

ENWIK8 = Archive(
    name="enwik8.zip",
    checksum="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    urls=("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
    members={"enwik8": "enwik8"},
    sizes={"enwik8": 100_000_000},
)
TEXT8 = Archive(
    name="text8.zip",
    checksum="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    urls=("https://mattmahoney.net/dc/text8.zip", "https://data.deepai.org/text8.zip"),
    members={"text8": "text8"},
    sizes={"text8": 100_000_000},
)
WIKITEXT_2 = Archive(
    name="wikitext-2-v1.zip",
    checksum="sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    urls=(
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
    ),
    members={f"wikitext-2/{name}": name for name in _WIKITEXT_SPLITS.values()},
)
WIKITEXT_103 = Archive(
    name="wikitext-103-v1.zip",
    checksum="sha256:242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    urls=(
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
    ),
    members={f"wikitext-103/{name}": name for name in _WIKITEXT_SPLITS.values()},
)
PTB = Archive(
    name="simple-examples.tgz",
    checksum="md5:30177ea32e27c525793142b6bf2c8e2d",
    urls=(
        "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
        "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
    ),
    members={f"./simple-examples/data/{name}": name for name in _PTB_SPLITS.values()},
)


ARCHIVES = {
    "enwik8": ENWIK8,
    "text8": TEXT8,
    "wikitext-2": WIKITEXT_2,
    "wikitext-103": WIKITEXT_103,
    "ptb": PTB,
}


def python(progress: Progress) -> Corpus:
    return local.python_sources()


def enwik8(progress: Progress) -> Corpus:
    return _by_bytes("enwik8", "bytes", progress)


def text8(progress: Progress) -> Corpus:
    return _by_bytes("text8", "letters", progress)


def wikitext_2(progress: Progress) -> Corpus:
    return _by_files("wikitext-2", _WIKITEXT_SPLITS, progress)


def wikitext_103(progress: Progress) -> Corpus:
    return _by_files("wikitext-103", _WIKITEXT_SPLITS, progress)


def ptb(progress: Progress) -> Corpus:
    return _by_files("ptb", _PTB_SPLITS, progress)


def _by_bytes(name: str, form: Form, progress: Progress) -> Corpus:
    """One file; its last bytes are held out, the usual split."""
    path = _downloaded(name, progress) / name
    size = path.stat().st_size
    cuts = (0, size - 2 * _HELD_OUT_BYTES, size - _HELD_OUT_BYTES, size)
    train, valid, test = ((Piece(path, start, stop),) for start, stop in pairwise(cuts))
    return Corpus(name, {"train": train, "valid": valid, "test": test}, form)


def _by_files(name: str, files: Mapping[str, str], progress: Progress) -> Corpus:
    """One file of words for each split."""
    folder = _downloaded(name, progress)
    return Corpus(name, {split: (Piece.whole(folder / file),) for split, file in files.items()})


def _downloaded(name: str, progress: Progress) -> Path:
    return unpacked(ARCHIVES[name], folder_of(name), home() / "downloads", progress)


def folder_of(name: str) -> Path:
    """The folder of a downloaded corpus."""
    return home() / "corpora" / name


def find(name_or_path: str, progress: Progress, *, binary: bool = False, field: str | None = None) -> Corpus:
    """The corpus with this name (downloaded if needed), or the text in this file or folder.

    It may also be a glob, files separated by commas (`patterns.py`), or `-` for standard input. With `binary`
    files may hold any bytes. `field` has the text of JSON lines: of `.jsonl` files, and if it is given of
    standard input.
    """
    if not name_or_path:  # as a path it would be the current folder
        raise UserError("the name of the corpus is empty: give a named corpus, a text file or a folder")
    if name_or_path == standard_input.NAME:
        place = standard_input.stored(progress, json_lines=field is not None)
        return local.from_file(place, binary=binary, field=field)
    path, looks_like_a_path = expanded(name_or_path), _looks_like_a_path(name_or_path)
    if os.path.exists(path) and is_name(name_or_path):
        warnings.warn(
            f"'{name_or_path}' is taken as the corpus of that name, not as the file or folder: for that, "
            f"give ./{name_or_path}",
            stacklevel=2,
        )
    if not looks_like_a_path and name_or_path in CORPORA:
        return _registered(name_or_path, progress, binary, field)
    added = named_paths.registered()
    if name_or_path in added:
        follow_links = named_paths.follows_links(name_or_path)
        found = local.from_path(added[name_or_path], follow_links=follow_links, binary=binary, field=field)
        return replace(found, name=name_or_path)
    if patterns.is_pattern(name_or_path):
        with _telling(progress, name_or_path):
            return local.from_pattern(name_or_path, binary=binary, field=field)
    if path.exists() or looks_like_a_path:  # it looks like a path, not like a name
        with _telling(progress, name_or_path):
            return local.from_path(path, binary=binary, field=field)
    hint = nearest(name_or_path, [*CORPORA, *added])
    raise UserError(
        f"there is no corpus, file or folder '{name_or_path}'{hint} ('longspan data list' lists them)"
    )


def check_path(name_or_path: str) -> None:
    """Raise if it can only be a path and nothing is there: a quick look before anything heavy is imported."""
    path = expanded(name_or_path)
    named = patterns.is_pattern(name_or_path) or name_or_path in named_paths.registered()
    if _looks_like_a_path(name_or_path) and not named and not os.path.lexists(path):
        raise local.nothing_at(path)


def _looks_like_a_path(name_or_path: str) -> bool:
    path = expanded(name_or_path)
    return bool(path.suffix) or path.name != name_or_path


def _telling(progress: Progress, name: str) -> AbstractContextManager[Task]:
    """Large texts take a while: they are checked, and unpacked if they are compressed."""
    return told(progress, f"checking {name}")


def file_of(name_or_path: str) -> Path | None:
    """The path of a text file, if it is one or standard input, and not the name of a corpus."""
    if name_or_path == standard_input.NAME:
        return standard_input.stored()
    path = expanded(name_or_path)
    return path if name_or_path and not is_name(name_or_path) and os.path.isfile(path) else None


def _registered(name: str, progress: Progress, binary: bool, field: str | None) -> Corpus:
    found = CORPORA[name].resolve()(progress)
    if isinstance(found, str | Path):
        path = expanded(found)
        # A plugin chose the folder.
        found = local.from_path(path, follow_links=True, binary=binary, field=field)
    if not isinstance(found, Corpus):
        raise UserError(
            f"the corpus '{name}' was loaded as a {type(found).__name__}: its load must return a path or a "
            "longspan.data.Corpus"
        )
    return replace(found, name=name)


def is_name(corpus: str) -> bool:
    """Whether it is the name of a corpus, and no path."""
    return (
        "." not in corpus and "/" not in corpus and corpus in CORPORA
    ) or corpus in named_paths.registered()


def anchored(corpus: str) -> str:
    """The same corpus from any working directory: paths are absolute, standard input is what was stored."""
    if corpus == standard_input.NAME:
        return str(standard_input.stored())
    if is_name(corpus):
        return corpus
    if patterns.is_pattern(corpus):
        return patterns.anchored(corpus)
    return str(expanded(corpus).absolute())


def add(
    name: str, place: Path, *, follow_links: bool = False, binary: bool = False, field: str | None = None
) -> Path:
    """Give a file or folder of text a name.

    `follow_links` allows links that lead out of the folder. With `binary` it may hold any bytes. `field` has
    the text of JSON lines.
    """
    place = expanded(place).absolute()
    if name in CORPORA:
        raise UserError(f"'{name}' is a corpus that comes with longspan or a plugin: choose another name")
    if not name.isprintable():
        raise UserError(f"'{name}' has characters that cannot be printed: choose a name such as 'novels'")
    if not name or "/" in name or Path(name).exists():
        raise UserError(f"'{name}' looks like a path: choose a name such as 'novels'")
    # Errors appear now, not when a training starts.
    local.from_path(place, follow_links=follow_links, binary=binary, field=field)
    named_paths.register(name, place, follow_links=follow_links)
    return place
