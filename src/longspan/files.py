"""Atomic writing: a reader never sees a partial file, even if the writer is killed; and locks for writers.

Data is written next to its target, under a name with the machine and process id of the writer. The next
writer of the same target removes what dead processes left behind.
"""

from __future__ import annotations

import errno
import itertools
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_held: set[tuple[int, Path]] = set()  # locks by thread and path


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty file next to `path`; if the block succeeds, it is renamed to `path`.

    Its permissions are `mode` without those that the umask forbids.
    """
    partial = _beside(path)
    partial.touch(mode, exist_ok=False)
    permissions = stat.S_IMODE(partial.stat().st_mode)
    try:
        yield partial
        partial.chmod(permissions)  # some libraries replace it by a file that only the owner can read
        to_disk(partial)
        os.replace(partial, path)
        to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *, first_wins: bool = False) -> Iterator[Path]:
    """Yield an empty folder next to `path`; if the block succeeds, it is renamed to `path`.

    If `path` was created in the meantime it is kept and ours is deleted, with a `FileExistsError`. With
    `first_wins` there is no error: for caches where all writers write the same.
    """
    partial = _beside(path)
    partial.mkdir()
    permissions = stat.S_IMODE(partial.stat().st_mode)
    try:
        yield partial
        for entry in partial.rglob("*"):
            entry.chmod(permissions if entry.is_dir() else permissions & 0o666)
            to_disk(entry)
        to_disk(partial)
        try:
            os.replace(partial, path)
        except OSError:
            if not path.exists():
                raise
            if not first_wins:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        to_disk(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def process_folder(path: Path) -> Path:
    """A new folder next to `path` for this process alone. Those of dead processes are removed."""
    folder = _beside(path)
    folder.mkdir(mode=0o700)
    return folder


def left_over(path: Path) -> list[Path]:
    """Partial files and folders of `path`, of any process: for a writer that knows to be the only one."""
    return [entry for entry in path.parent.iterdir() if _writer(entry, path) is not None]


def partial_path(path: Path, writer: str) -> Path:
    """The name next to `path` for what `writer`, see `new_writer`, has not yet completed."""
    return path.with_name(f".{path.name}.{writer}.part")


def new_writer() -> str:
    """A name for one writing process: its id, a random number and its machine."""
    return f"{os.getpid()}.{secrets.token_hex(4)}@{_machine()}"


def remove_folder(path: Path) -> None:
    """Remove a folder: it disappears at once, so no other process sees a part of it."""
    partial = _beside(path)
    os.replace(path, partial)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Keep other processes that use this lock from changing `path`: they wait until the block ends.

    The lock is on a file of its own, which is yielded, since `path` itself is replaced. It stays; the system
    releases the lock when a process ends. `waiting` is called before it waits. A thread that has the
    lock already does not wait for itself.
    """
    held = threading.get_ident(), path
    if held in _held:
        yield _lock_file(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(_lock_file(path), flags | os.O_RDWR, 0o666)  # NFS locks only these
    except PermissionError:  # the file belongs to another user
        descriptor = os.open(_lock_file(path), flags | os.O_RDONLY, 0o666)
    try:
        if sys.platform != "win32":
            with suppress(OSError):  # some network file systems have no locks: go on without
                _lock(descriptor, waiting)
        _held.add(held)
        yield _lock_file(path)
    finally:
        _held.discard(held)
        os.close(descriptor)


@contextmanager
def alone(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """For making `path`, which appears as a whole: other processes wait, and then find it.

    This only saves work. On a file system without locks all make it, and one whole result is kept. So the
    file of the lock can be removed.
    """
    with locked(path, waiting) as lock:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


def _lock(descriptor: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def free_folder(wanted: Path) -> Path:
    """`wanted`, or if it exists `wanted-2`, `wanted-3` ..., whichever is free."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], numbered) if not path.exists())


def _beside(path: Path) -> Path:
    """A free name next to `path` with our machine and process id. Leftovers of dead processes are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in path.parent.iterdir():
        if _is_left_over(entry, path):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    return partial_path(path, new_writer())


def _machine() -> str:
    """Where our process ids are valid: containers may have the same host name and ids of their own."""
    try:
        return f"{platform.node()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def _is_left_over(entry: Path, path: Path) -> bool:
    """Whether `entry` is a partial `path` whose writer, a process of this machine, is dead."""
    name = _writer(entry, path)
    return name is not None and name[2] == _machine() and not _is_alive(int(name[1]))


def _writer(entry: Path, path: Path) -> re.Match[str] | None:
    """Process id and host of the writer, if `entry` is a partial `path`."""
    return re.fullmatch(rf"\.{re.escape(path.name)}\.(\d+)\.[0-9a-f]+@(.*)\.part", entry.name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
