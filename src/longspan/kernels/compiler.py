"""C++ code, compiled for this machine's CPU when it is first needed and kept for the next run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path

from longspan.files import whole_file
from longspan.private_folder import add_checksum, code_folder, is_ours

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
PATIENCE = 120
"""Seconds that compiling may take."""


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library compiled from this file, or None where that fails: plain torch is used then.

    The compiler is GCC, or what `CXX` and `CXXFLAGS` say. OpenMP and its threads are those of torch, if torch
    has loaded it under the usual name.
    """
    try:
        if not _has_compiler():
            if platform.system() == "Linux":
                warnings.warn(
                    f"there is no C++ compiler '{_compiler()[0]}', and plain torch takes longer: install "
                    "g++, or name another compiler in CXX",
                    stacklevel=2,
                )
            return None
        command = [*_compiler(), *shlex.split(os.environ.get("CXXFLAGS", "")), *OPTIONS]
        made = code_folder() / f"{source.stem}-{_identity(command, source)}.so"
        return _loaded(made) or _compiled_anew([*command, source], made)
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        said = getattr(problem, "stderr", None) or str(problem).encode()
        reason = said.decode(errors="replace").strip().splitlines()[0]
        warnings.warn(f"{source.name} is not compiled, and plain torch takes longer: {reason}", stacklevel=2)
        return None


def can_compile() -> bool:
    """Whether there is a compiler. This compiles nothing."""
    try:
        return _has_compiler()
    except ValueError:  # CXX is no command
        return False


def _has_compiler() -> bool:
    return platform.system() == "Linux" and shutil.which(_compiler()[0]) is not None


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def _loaded(made: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(made)) if is_ours(made) else None
    except OSError:  # from another system
        return None


def _compiled_anew(command: list[str | Path], made: Path) -> ctypes.CDLL:
    with whole_file(made, mode=0o600) as half_made:
        _run([*command, "-o", half_made])
        add_checksum(half_made)
    return ctypes.CDLL(str(made))


def _identity(command: list[str], source: Path) -> str:
    """A hash of the command, the source, and the macros that compiler and CPU define."""
    parts = [shlex.join(command).encode(), _run([*command, "-dM", "-E", "-x", "c++", "/dev/null"])]
    return hashlib.sha256(b"\n".join([*parts, source.read_bytes()])).hexdigest()[:16]


def _run(command: list[str | Path] | list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE, umask=0o077).stdout
