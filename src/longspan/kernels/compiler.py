"""C++ for this machine's processor, compiled when it is first needed and kept for the next time."""

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
from longspan.home import home

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
PATIENCE = 120
"""Seconds that compiling may take."""


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library made of this file, or None where no compiler can make it: then plain torch must do.

    The compiler is GCC; `CXX` and `CXXFLAGS` are heeded as usual. OpenMP is the one that torch has loaded, if
    it has the usual name, and so are its threads.
    """
    try:
        command = shlex.split(os.environ.get("CXX") or "c++")
        if platform.system() != "Linux" or shutil.which(command[0]) is None:
            return None
        command += [*shlex.split(os.environ.get("CXXFLAGS", "")), *OPTIONS]
        made = home() / "compiled" / f"{source.stem}-{_identity(command, source)}.so"
        return _loaded(made) or _compiled_anew([*command, source], made)
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        said = getattr(problem, "stderr", None) or str(problem).encode()
        reason = said.decode(errors="replace").strip().splitlines()[0]
        warnings.warn(f"{source.name} is not compiled, and plain torch takes longer: {reason}", stacklevel=2)
        return None


def _loaded(made: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(made)) if made.exists() else None
    except OSError:  # damaged
        return None


def _compiled_anew(command: list[str | Path], made: Path) -> ctypes.CDLL:
    made.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(made) as half_made:
        _run([*command, "-o", half_made])
    return ctypes.CDLL(str(made))


def _identity(command: list[str], source: Path) -> str:
    """Of all that the library depends on: what the compiler knows of itself and of this processor, too."""
    parts = [shlex.join(command).encode(), _run([*command, "-dM", "-E", "-x", "c++", "/dev/null"])]
    return hashlib.sha256(b"\n".join([*parts, source.read_bytes()])).hexdigest()[:16]


def _run(command: list[str | Path] | list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE).stdout
