"""What the machine can do: time, memory, precision, matrix products, reading."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from longspan.config.training import Precision

_DTYPE = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE = {"cpu": 2048, "cuda": 8192}
_SIDE_OF_HALVES_ON_CPU = 512  # few CPUs have instructions for fp16: without, larger ones take a minute
_PRODUCTS, _PASSES = 10, 20


def seconds_of(work: Callable[[], object], device: torch.device, *, times: int, warm_ups: int) -> list[float]:
    """How long each of `times` runs took, after some that do not count.

    On a GPU nobody waits between runs, as nobody does in training: what the host does while the device still
    has work takes no time. A run lasts from when the device is done with the one before to when it is done
    with this one.
    """
    for _ in range(warm_ups):
        work()
    if device.type == "cuda":
        return _seconds_in_a_row(work, torch.cuda.current_stream(device), times)
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _seconds_in_a_row(work: Callable[[], object], stream: torch.cuda.Stream, times: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        work()
        mark.record(stream)
    marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(device.type, _DTYPE[precision], enabled=precision != "float32")


def matrix_rate(device: torch.device, precision: Precision) -> float:
    """FLOPs per second of large square matrix products with torch's present settings, by the fastest of them.

    What a machine can do is what it does when nothing else keeps it busy.
    """
    side = _SIDE.get(device.type, _SIDE["cpu"])
    if device.type == "cpu" and precision == "fp16":
        side = _SIDE_OF_HALVES_ON_CPU
    left, right = (torch.randn(side, side, device=device).to(_DTYPE[precision]) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device, times=_PRODUCTS, warm_ups=3)
    return 2 * side**3 / min(seconds)


def reading_seconds(tensors: list[Tensor]) -> float:
    """How long it takes at best to read all these tensors once, as one array, for its largest value."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return min(seconds_of(flat.amax, flat.device, times=_PASSES, warm_ups=3))


def watch_memory(device: torch.device) -> Callable[[], int | None]:
    """From now on; what is returned tells the most bytes held at any time beyond those held now.

    On a GPU it is what torch has reserved: a recorded step keeps its memory between replays, when few tensors
    in it are alive to be counted. On a CPU it is the memory of the process, which only Linux tells.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_reserved(device)
        return lambda: torch.cuda.max_memory_reserved(device) - held
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return lambda: None
    try:
        # What was freed is given back: the process would seem to need less when it takes that again.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except (OSError, AttributeError):
        return lambda: None
    resident = _process_bytes("VmRSS")
    return lambda: max(0, _process_bytes("VmHWM") - resident)


def _process_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
