"""Several files in one word: a glob such as `texts/*.txt`, or files and globs separated by commas.

`**` stands for any folders. A file or folder whose name is the whole text has precedence. `[,]` is a comma
in a name, as `[*]` is a star.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from longspan.errors import UserError
from longspan.home import expanded

_BETWEEN = re.compile(r"(?<!\[),(?!\])")  # a comma that is not written as [,]
_ESCAPED = re.compile(r"\[([*?\[,])\]")


def is_pattern(text: str) -> bool:
    """Whether it stands for several files, and is no path of its own."""
    return bool(glob.has_magic(text) or _BETWEEN.search(text)) and not os.path.exists(
        os.path.expanduser(text)
    )


def anchored(pattern: str) -> str:
    """The same files from any working directory."""
    return ",".join(map(_absolute, _BETWEEN.split(pattern)))


def matching(pattern: str) -> tuple[Path, list[Path]]:
    """The files of a pattern, each once, and a folder that all are in. Those of a glob are sorted.

    Globs do not follow links to folders, and a link to a file must stay below the first part with a star.
    """
    files, folders = dict[Path, None](), []
    for part in _BETWEEN.split(pattern):
        if not part.strip():
            raise UserError(f"'{pattern}' has an empty entry: write files with one comma between them")
        path = expanded(part).absolute()
        if os.path.exists(path) or not glob.has_magic(part):
            found = [_file(path, shown=part)]
            folders.append(path.parent)
        else:
            folder, found = _globbed(_absolute(part), shown=part)
            folders.append(folder)
        files |= dict.fromkeys(found)
    return Path(os.path.commonpath(folders)), list(files)


def _file(path: Path, shown: str) -> Path:
    if path.is_dir():
        raise UserError(
            f"{shown} is a folder: among several files, write '{shown.rstrip('/')}/**' for its files"
        )
    if not path.exists():
        raise UserError(f"there is no file {shown}")
    if not path.is_file():
        raise UserError(f"{shown} is not a regular file: copy its text to one first")
    return path


def _globbed(pattern: str, shown: str) -> tuple[Path, list[Path]]:
    folder = Path("/")
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(_ESCAPED.sub("", part)):
            break
        folder /= _ESCAPED.sub(r"\1", part)
    found = []
    for name in sorted(glob.glob(pattern, recursive=True)):
        path = Path(name)
        if path.is_file() and not _through_linked_folder(path, folder):
            _check_link(path, folder)
            found.append(path)
    if not found:
        raise UserError(f"no file matches '{shown}' (links to folders are not followed)")
    return folder, found


def _through_linked_folder(path: Path, folder: Path) -> bool:
    between = path.relative_to(folder).parents
    return any((folder / part).is_symlink() for part in list(between)[:-1])


def _check_link(path: Path, folder: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{path} is a link to {path.resolve()}, outside of {folder}: remove it, or name the file itself"
        )


def _absolute(part: str) -> str:
    """One entry with an absolute path; the names of the folders before it are taken as they are."""
    if os.path.isabs(part):
        return part
    before, rest = os.getcwd(), part
    if part.startswith("~"):
        user, _, rest = part.partition("/")
        before = os.path.expanduser(user)
    return f"{glob.escape(before).replace(',', '[,]')}/{rest}"
