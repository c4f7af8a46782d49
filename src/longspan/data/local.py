"""Text on this machine: the standard library, files and folders."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from longspan.data import data_bin, splitting
from longspan.data.corpus import SPLITS, WHOLE, Corpus, Piece
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


def from_path(path: Path) -> Corpus:
    """The text in a file or a folder."""
    if path.is_dir():
        return from_folder(path)
    if path.is_file():
        return from_file(path)
    if path.exists():
        raise UserError(f"{path} is not a regular file: copy its text to one first")
    raise UserError(f"there is no file or folder {path}")


def from_file(path: Path) -> Corpus:
    """One text, split by position."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to train on")
    return Corpus(path.stem, splitting.by_position(str(path), [Piece.whole(path)]))


def whole_file(path: Path) -> Corpus:
    """One text that is not split: its only split is `whole`."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: there is no text to score")
    return Corpus(path.stem, {WHOLE: (Piece.whole(path),)})


def from_folder(folder: Path) -> Corpus:
    """`train.txt`, `valid.txt` and `test.txt` if they are there, else every text file, split by file.

    A folder that fairseq prepared has numbers of words instead (`data_bin.py`).
    """
    if data_bin.is_data_bin(folder):
        return data_bin.from_folder(folder)
    name = folder.resolve().name
    own_splits = {split: folder / f"{split}.txt" for split in SPLITS}
    missing = [path.name for path in own_splits.values() if not path.is_file()]
    if not missing:
        return Corpus(name, {split: (Piece.whole(path),) for split, path in own_splits.items()})
    if own_splits["train"].is_file():  # other splits made here could contain train text
        raise UserError(f"{folder} has train.txt but no {' or '.join(missing)}: add what is missing")
    files = _in_order(folder, [path for path in _visible_files(folder) if _is_text(path)])
    if not files:
        raise UserError(f"{folder} has no text files (links to folders are not followed)")
    return Corpus(name, splitting.by_file(folder, files))


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(_SNIFF_BYTES)
    return bool(beginning) and b"\0" not in beginning


def _in_order(folder: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())
