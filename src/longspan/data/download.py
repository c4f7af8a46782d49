"""Archives from the web: several mirrors, verified checksums, unpacked completely or not at all."""

from __future__ import annotations

import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import pooch

from longspan.data.checksums import crc32, remembered
from longspan.errors import UserError
from longspan.files import locked, whole_folder
from longspan.progress import Task, told

Progress = Callable[[str], None]

# The Internet Archive as a last mirror; `id_` asks for the original file.
_WEB_ARCHIVE = "https://web.archive.org/web/2023id_/"
_TIMEOUT_SECONDS = 30
_FACTS = "unpacked.json"  # size and CRC-32 of each unpacked file


@dataclass(frozen=True)
class Archive:
    """A zip or tar file, its URLs, and the files to extract from it."""

    name: str
    checksum: str  # "sha256:..." or "md5:...", of the archive
    urls: tuple[str, ...]
    members: Mapping[str, str]  # path in the archive -> name after unpacking
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of unpacked files, where known

    @property
    def mirrors(self) -> tuple[str, ...]:
        return (*self.urls, _WEB_ARCHIVE + self.urls[0])


def unpacked(archive: Archive, folder: Path, downloads: Path, progress: Progress) -> Path:
    """`folder` with the archive's files in it; the archive is downloaded if needed."""
    if not folder.is_dir():
        with locked(downloads / archive.name):
            if not folder.is_dir():  # else another process has unpacked it in the meantime
                _unpack(archive, folder, downloads, progress)
    _check_unpacked(archive, folder)
    return folder


def _unpack(archive: Archive, folder: Path, downloads: Path, progress: Progress) -> None:
    source = _fetched(archive, downloads, progress)
    progress(f"unpacking {archive.name}")
    with (
        told(progress, f"unpacking {archive.name}"),
        _members(source) as open_member,
        whole_folder(folder, first_wins=True) as unfinished,
    ):
        facts = {}
        for member, name in archive.members.items():
            with open_member(member) as packed, (unfinished / name).open("xb") as file:
                size = crc = 0
                while chunk := packed.read(1 << 20):
                    size, crc = size + file.write(chunk), zlib.crc32(chunk, crc)
                facts[name] = [size, crc]
        (unfinished / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _members(source: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """A function that opens a file of the archive. Paths in the archive are never used to write."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as zipped:
            yield zipped.open
        return
    with tarfile.open(source) as tar:

        def open_member(name: str) -> IO[bytes]:
            packed = tar.extractfile(name)
            if packed is None:
                raise UserError(f"'{name}' in {source} is not a regular file")
            return packed

        yield open_member


def _check_unpacked(archive: Archive, folder: Path) -> None:
    """A `UserError` if a file is not as it was unpacked. Its checksum is computed once per change."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # unpacked by an older version, or by hand
        facts = {}
        missing = [name for name in archive.members.values() if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{folder} has no {' or '.join(missing)}: add what is missing, or delete the folder"
            ) from None
    except ValueError:
        raise _damaged(folder / _FACTS) from None
    for name in archive.members.values():
        path = folder / name
        size, crc = facts.get(name) or (archive.sizes.get(name), None)
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise _damaged(path)
        if crc is not None and remembered(path, "crc32", partial(crc32, path)) != crc:
            raise _damaged(path)


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged or missing: delete the folder {path.parent}, it is then unpacked again"
    )


def _fetched(archive: Archive, downloads: Path, progress: Progress) -> Path:
    path = downloads / archive.name
    algorithm, _, expected = archive.checksum.partition(":")
    if path.exists():
        if pooch.file_hash(str(path), alg=algorithm) != expected:
            raise UserError(
                f"{path} is damaged or a different file (its {algorithm} is not {expected}): "
                "delete it, or replace it with the right file"
            )
        return path
    for url in archive.mirrors:
        if download(url, path, archive.checksum, progress) is None:
            return path
    raise UserError(
        f"could not download {archive.name}: get it from {archive.urls[0]} or elsewhere and put it at {path}"
    )


def download(url: str, path: Path, checksum: str | None, progress: Progress) -> str | None:
    """Write the file at `url` to `path`, completely or not at all; if that fails, return the reason."""
    pooch.get_logger().setLevel("ERROR")  # `progress` reports it already
    progress(f"downloading {url}")
    try:
        with told(progress, f"downloading {path.name}", "bytes") as telling:
            pooch.retrieve(
                url,
                known_hash=checksum,
                fname=path.name,
                path=path.parent,
                downloader=pooch.HTTPDownloader(
                    progressbar=_Bar(telling),
                    timeout=_TIMEOUT_SECONDS,
                    headers={"User-Agent": "Mozilla/5.0 (longspan)"},  # one mirror refuses plain tools
                ),
            )
    except (OSError, ValueError) as problem:  # no network, no such file, or not the right file
        progress(f"download failed: {_first_line(problem)}")
        return _first_line(problem)
    return None


def _first_line(problem: Exception) -> str:
    lines = str(problem).splitlines() or [type(problem).__name__]
    return lines[0][:120]


class _Bar:
    """The progress bar interface that pooch expects."""

    def __init__(self, telling: Task) -> None:
        self._telling = telling
        self._done = 0
        self.total = 0

    def update(self, size: int) -> None:
        self._done += size
        self._telling(self._done, self.total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass
