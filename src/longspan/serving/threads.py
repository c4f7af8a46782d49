"""How many CPU threads continue texts fastest.

A small model is continued faster by one thread than by several that wait for each other, and the others are
then free for clients.
"""

from __future__ import annotations

import time

import torch

from longspan.models import LanguageModel
from longspan.serving.row_decoder import RowDecoder
from longspan.serving.slots import begun, has_fixed_shapes

TOKENS = 8  # timed with every number of threads, after one that is not
LONGEST = 0.5  # seconds for one number of threads: a large model is timed with fewer tokens


def fastest_threads(model: LanguageModel, rows: int, most: int) -> int:
    """`most` or 1, by timing steps of this many rows in the thread that calls; they are then in use."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if not on_cpu or most == 1 or not has_fixed_shapes(model):
        return most
    seconds = {threads: _seconds(model, rows, threads) for threads in (most, 1)}
    fastest = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(fastest)
    return fastest


def _seconds(model: LanguageModel, rows: int, threads: int) -> float:
    """The shortest time of a step."""
    torch.set_num_threads(threads)
    decoder = RowDecoder(model, begun(model, rows))
    tokens_B1 = torch.zeros(rows, 1, dtype=torch.long)
    decoder.read(tokens_B1)
    ends = time.perf_counter() + LONGEST
    times: list[float] = []
    while len(times) < TOKENS and (not times or time.perf_counter() < ends):
        began = time.perf_counter()
        decoder.read(tokens_B1)
        times.append(time.perf_counter() - began)
    return min(times)
