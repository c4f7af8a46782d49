"""Where compiled code is kept: only code that this user compiled is ever loaded, and only undamaged.

A library runs with all rights of the user who loads it. So its folder must belong to this user, nobody else
may write to it, and no other user may replace it or a folder above it. A checksum at the end of the file
detects damage. (The loader ignores what follows the last section of a library.)
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import pooch

from longspan.home import home

if sys.platform != "win32":
    import grp
    import pwd

_ROOT = 0


def code_folder() -> Path:
    """The folder for compiled code: in `LONGSPAN_HOME`, else in the user's cache, else for this process only.

    It is the first of these that only this user can write to.
    """
    in_home, in_cache = home() / "compiled", Path(pooch.os_cache("longspan")) / "compiled"
    in_home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_private(kept := in_home.resolve()):  # resolved: others could change a link on the way
        return kept
    with suppress(OSError):  # it cannot be made
        in_cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(kept := in_cache.resolve()):
            return kept
    warnings.warn(
        f"others can write to {in_home}: code is compiled again by every process; set LONGSPAN_HOME to "
        "a folder that only you can write to",
        stacklevel=2,
    )
    return _folder_of_this_process()


def is_private(folder: Path) -> bool:
    """Whether this user owns the folder, and only this user and root can replace anything on its path.

    The path must be absolute and without links.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or _others_can_write(status):
        return False
    return all(_is_safe_above(parent.stat()) for parent in folder.parents)


def add_checksum(library: Path) -> None:
    """Append the checksum of a library to it."""
    checksum = hashlib.sha256(library.read_bytes()).digest()
    with library.open("ab") as file:
        file.write(checksum)


def is_ours(library: Path) -> bool:
    """Whether this user wrote the library, nobody else can write to it, and its checksum is right."""
    try:
        status = library.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or _others_can_write(status):
            return False
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _is_safe_above(status: os.stat_result) -> bool:
    """In a folder with the sticky bit, such as /tmp, users can rename and delete only what they own."""
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return status.st_uid in (os.geteuid(), _ROOT) and (is_sticky or not _others_can_write(status))


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether only this user is in the group: many systems have one for every user, and a umask of 002."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@cache
def _folder_of_this_process() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="longspan-"))  # only its owner can enter it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
