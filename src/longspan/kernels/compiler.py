"""C++ for this machine's processor, compiled when it is first needed and kept for the next time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from longspan.files import whole_file
from longspan.home import home

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library made of this file, or None where no compiler can make it: then plain torch must do.

    `CXX` and `CXXFLAGS` are heeded as usual. OpenMP is the one that torch has loaded, if it has the usual
    name, and so are its threads.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None or platform.system() != "Linux":
        return None
    command = [compiler, *OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    try:
        made = home() / "compiled" / f"{source.stem}-{_identity(command, source)}.so"
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(made) as half_made:
                subprocess.run([*command, "-o", half_made, source], check=True, capture_output=True)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.CalledProcessError):
        return None


def _identity(command: list[str], source: Path) -> str:
    """Of all that the library depends on: what is native to one processor another may not understand."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    first_core, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    kind = [
        line
        for line in first_core.splitlines()
        if line.startswith(("vendor", "cpu family", "model", "flags"))
    ]
    parts = [shlex.join(command).encode(), version, *map(str.encode, kind), source.read_bytes()]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
