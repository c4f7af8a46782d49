"""Text on this machine: the standard library, files and folders."""

from __future__ import annotations

import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote

from longspan.data import data_bin, splitting
from longspan.data.corpus import SPLITS, WHOLE, Corpus, Piece
from longspan.data.file_type import hides_text, is_text, text_file
from longspan.errors import UserError

_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_SNIFF_BYTES = 8192


def python_sources() -> Corpus:
    """The standard library of the Python that is running, split by file."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in folder.rglob("*.py")
        if not _NOT_STANDARD_LIBRARY.intersection(path.relative_to(folder).parts) and path.is_file()
    ]
    return Corpus("python", splitting.by_file(folder, _in_order(folder, files)))


def from_path(path: Path, *, follow_links: bool = False, binary: bool = False) -> Corpus:
    """The text in a file or a folder.

    `follow_links` is for a folder (see `from_folder`). With `binary` a file may hold any bytes.
    """
    if path.is_dir():
        return from_folder(path, follow_links=follow_links, binary=binary)
    if path.is_file():
        return from_file(path, binary=binary)
    if path.exists():
        raise UserError(f"{path} is not a regular file: copy its text to one first")
    raise UserError(f"there is no file or folder {path}")


def from_file(path: Path, *, binary: bool = False) -> Corpus:
    """One text, split by position."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to train on")
    piece = Piece.whole(path if binary else text_file(path))
    return Corpus(path.stem, splitting.by_position(str(path), [piece]))


def whole_file(path: Path, *, binary: bool = False) -> Corpus:
    """One text that is not split: its only split is `whole`."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to score")
    return Corpus(path.stem, {WHOLE: (Piece.whole(path if binary else text_file(path)),)})


def from_folder(folder: Path, *, follow_links: bool = False, binary: bool = False) -> Corpus:
    """`train.txt`, `valid.txt` and `test.txt` if they are there, else every text file, split by file.

    A folder that fairseq prepared has numbers of words instead (`data_bin.py`).
    A link to a file outside the folder is an error unless `follow_links`: the folder may come from elsewhere,
    and the link may lead to a file that should not be trained on. With `binary` it is every file that is not
    empty.
    """
    if data_bin.is_data_bin(folder):
        _check_links(folder, sorted(folder.iterdir()), follow_links)
        return data_bin.from_folder(folder)
    name = folder.resolve().name
    own_splits = {split: folder / f"{split}.txt" for split in SPLITS}
    missing = [path.name for path in own_splits.values() if not path.is_file()]
    if not missing:
        _check_links(folder, own_splits.values(), follow_links)
        texts = own_splits if binary else {split: text_file(path) for split, path in own_splits.items()}
        return Corpus(name, {split: (Piece.whole(path),) for split, path in texts.items()})
    if own_splits["train"].is_file():  # other splits made here could contain train text
        raise UserError(f"{folder} has train.txt but no {' or '.join(missing)}: add what is missing")
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
    return Corpus(name, splitting.by_file(folder, files))


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
