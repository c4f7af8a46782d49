"""The kernels for short windows on this machine's processor, by an emulator of the CUDA that they use."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from longspan.kernels.span_attention import short

FOLDER = Path(__file__).parent
INSTRUCTIONS = FOLDER / "instructions.hpp"
COMPILER = shlex.split(os.environ.get("CXX") or "c++")
IS_POSSIBLE = platform.system() == "Linux" and shutil.which(COMPILER[0]) is not None

GPU = SimpleNamespace(multi_processor_count=1, shared_memory_per_multiprocessor=228 * 1024)
"""An H200 but for its size: programs have more than one step or tile to do."""

Launch = Callable[..., bytes | None]
"""With the sizes of the grid, the threads and shared memory of a program, and where the arguments lie: what
went wrong, if anything did."""


class Kernel:
    """Called as those of a GPU are; what the emulator finds wrong is an error."""

    def __init__(self, name: str, launch: Launch, threads: int, shared_memory: int) -> None:
        self.name, self.launch, self.threads, self.shared_memory = name, launch, threads, shared_memory

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        cells = [short._cell(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        problem = self.launch(*(*grid, 1, 1)[:3], self.threads, self.shared_memory, places)
        assert problem is None, f"{self.name}: {problem.decode()}"


def kernels(q_BHTK: Tensor, longest_window: int, options: short.Options) -> dict[str, Kernel]:
    """In place of `short._kernels`."""
    half = short.HALVES[q_BHTK.dtype]
    return _compiled(short._band(longest_window), options.first_distance, options.dropout > 0, half)


@cache
def _compiled(band: int, first_distance: int, drops: bool, half: str) -> dict[str, Kernel]:
    options = short.compiler_options(band, first_distance, drops, half)
    sizes, made = short._shared_memories(band, GPU), {}
    for file, names in short.FILES.items():
        launches = compiled(short.source(file, INSTRUCTIONS), [f"short_{name}" for name in names], options)
        for name, launch in zip(names, launches, strict=True):
            made[name] = Kernel(name, launch, short._threads(name), sizes[name])
    return made


def compiled(source: str, kernels: list[str], options: list[str]) -> list[Launch]:
    """A function that launches a kernel, for each of these."""
    parts = [(FOLDER / "emulator.hpp").read_text(), source, *(f"EMULATED({kernel})\n" for kernel in kernels)]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "emulated.so"
        # More optimisation would take longer than the kernels then save.
        command = [*COMPILER, *options, "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(made)]
        subprocess.run(command, input="".join(parts), text=True, check=True)
        library = ctypes.CDLL(str(made))
    launches: list[Launch] = []
    for kernel in kernels:
        launch = library[f"emulate_{kernel}"]
        launch.restype = ctypes.c_char_p
        launches.append(launch)
    return launches
