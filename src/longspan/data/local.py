"""Text on this machine: the standard library, files, folders and globs."""

from __future__ import annotations

import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote

from longspan.data import data_bin, json_lines, patterns, splitting
from longspan.data.corpus import SPLITS, WHOLE, Corpus, Piece
from longspan.data.file_type import hides_text, is_text, text_file
from longspan.data.workers import Workers, processes_for
from longspan.errors import UserError

_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_SNIFF_BYTES = 8192


def python_sources() -> Corpus:
    """The standard library of the Python that is running, split by file."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = list[Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_STANDARD_LIBRARY]
        files += [path for name in names if name.endswith(".py") and (path := Path(place, name)).is_file()]
    return Corpus("python", splitting.by_file(folder, _as_they_are(_in_order(folder, files))))


def from_path(
    path: Path, *, follow_links: bool = False, binary: bool = False, field: str | None = None
) -> Corpus:
    """The text in a file or a folder.

    `follow_links` is for a folder (see `from_folder`). With `binary` a file may hold any bytes. `field` has
    the text of JSON lines.
    """
    if path.is_dir():
        return from_folder(path, follow_links=follow_links, binary=binary, field=field)
    if path.is_file():
        return from_file(path, binary=binary, field=field)
    if path.exists():
        raise UserError(f"{path} is not a regular file: copy its text to one first")
    raise nothing_at(path)


def nothing_at(path: Path) -> UserError:
    return UserError(f"there is no file or folder {path}")


def from_file(path: Path, *, binary: bool = False, field: str | None = None) -> Corpus:
    """One text, split by position."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to train on")
    piece = Piece.whole(path if binary else text_of(path, field))
    return Corpus(path.stem, splitting.by_position(str(path), [piece]))


def from_pattern(pattern: str, *, binary: bool = False, field: str | None = None) -> Corpus:
    """The files of a glob or a list (see `patterns`), split by file.

    If they are called train, valid and test, they are the splits.
    """
    folder, files = patterns.matching(pattern)
    files = [path for path in files if path.stat().st_size > 0]
    if not files:
        raise UserError(f"the files of '{pattern}' are empty: there is no text to train on")
    if len(files) == 1:
        return from_file(files[0], binary=binary, field=field)
    if not binary and len({json_lines.is_json_lines(path) for path in files}) > 1:
        raise UserError(f"'{pattern}' stands for .jsonl and other files: give only one of the two")
    name = folder.resolve().name or "files"
    texts = _texts(files, binary, field)
    own_splits = {path.name.split(".")[0]: Piece.whole(text) for path, text in texts.items()}
    if len(files) == len(SPLITS) and set(own_splits) == set(SPLITS):
        return Corpus(name, {split: (own_splits[split],) for split in SPLITS})
    return Corpus(name, splitting.by_file(folder, texts))


def whole_file(path: Path, *, binary: bool = False, field: str | None = None) -> Corpus:
    """One text that is not split: its only split is `whole`."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to score")
    return Corpus(path.stem, {WHOLE: (Piece.whole(path if binary else text_of(path, field)),)})


def from_folder(
    folder: Path, *, follow_links: bool = False, binary: bool = False, field: str | None = None
) -> Corpus:
    """`train.txt`, `valid.txt` and `test.txt` if they are there, else every text file, split by file.

    The three may be `.jsonl` files instead. Other `.jsonl` files are read by their field if all files are.
    A folder that fairseq prepared has numbers of words instead (`data_bin.py`).
    A link to a file outside the folder is an error unless `follow_links`: the folder may come from elsewhere,
    and the link may lead to a file that should not be trained on. With `binary` it is every file that is not
    empty.
    """
    if data_bin.is_data_bin(folder):
        _check_links(folder, sorted(folder.iterdir()), follow_links)
        return data_bin.from_folder(folder)
    name = folder.resolve().name
    for suffix in (".txt", ".jsonl"):
        own_splits = {split: folder / f"{split}{suffix}" for split in SPLITS}
        missing = [path.name for path in own_splits.values() if not path.is_file()]
        if not missing:
            _check_links(folder, own_splits.values(), follow_links)
            texts = _texts(own_splits.values(), binary, field)
            return Corpus(name, {split: (Piece.whole(texts[path]),) for split, path in own_splits.items()})
        if own_splits["train"].is_file():  # other splits made here could contain train text
            raise UserError(f"{folder} has train{suffix} but no {' or '.join(missing)}: add what is missing")
    files, hidden = list[Path](), list[Path]()
    visible = list(_visible_files(folder))
    _check_links(folder, visible, follow_links)
    for path in visible:
        beginning = _beginning(path)
        if beginning and (binary or is_text(beginning)):
            files.append(path)
        elif hides_text(beginning):
            hidden.append(path)
    if hidden:
        warnings.warn(
            f"{len(hidden)} files in {folder} are compressed or UTF-16 and are left out, such as "
            f"{min(hidden)}: unpack them, or convert them to UTF-8",
            stacklevel=2,
        )
    files = _in_order(folder, files)
    if not files:
        raise UserError(f"{folder} has no text files (links to folders are not followed)")
    of_json = [path for path in files if json_lines.is_json_lines(path)]
    if len(of_json) == len(files):
        return Corpus(name, splitting.by_file(folder, _texts(files, binary, field)))
    if of_json and not binary:
        warnings.warn(
            f"{len(of_json)} .jsonl files in {folder} are read as plain text, since there are other files: "
            f"to read their texts, give '{folder}/**/*.jsonl'",
            stacklevel=2,
        )
    return Corpus(name, splitting.by_file(folder, _as_they_are(files)))


def text_of(path: Path, field: str | None) -> Path:
    """The file with the text of a file: itself, or a copy that was unpacked or extracted."""
    return json_lines.text_of(path, field) if json_lines.is_json_lines(path) else text_file(path)


def _texts(paths: Iterable[Path], binary: bool, field: str | None) -> dict[Path, Path]:
    """The same for several files; with `binary`, themselves."""
    files = list(paths)
    if binary:
        return _as_they_are(files)
    processes = min(len(files), processes_for(sum(path.stat().st_size for path in files)))
    if processes == 1:
        return {path: text_of(path, field) for path in files}
    with Workers("text-file", processes, field=field) as workers:
        texts = [Path(os.fsdecode(text)) for text in workers.map(map(os.fsencode, files))]
    return dict(zip(files, texts, strict=True))


def _as_they_are(files: Iterable[Path]) -> dict[Path, Path]:
    return {path: path for path in files}


def _visible_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _check_links(folder: Path, files: Iterable[Path], follow_links: bool) -> None:
    for path in files:
        if path.is_symlink() and not follow_links and not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path} is a link to {path.resolve()}, outside the folder: remove it, or allow links with "
                f"'longspan data add NAME {quote(str(folder))} --follow-links' and train on NAME"
            )


def _fail(problem: OSError) -> None:
    """A folder that cannot be read is an error, as a file is."""
    raise problem


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SNIFF_BYTES)


def _in_order(folder: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())
