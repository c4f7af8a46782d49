"""The evaluation protocol of a race: every byte is scored once, with at least half a context before it.

Shapes: B batch of readings, T block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.errors import UserError

# (tokens, targets, carried) -> nats of every target, carried; `carried` is None at the start of a reading.
Read = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Reading:
    """Scores the bytes `first` to `end` of the test, after reading `warm` + 1 bytes that are not scored."""

    first: int
    end: int
    warm: int

    @property
    def length(self) -> int:
        """The number of bytes that are read."""
        return self.warm + self.end - self.first


def windows(num_bytes: int, context: int) -> list[Reading]:
    """For models with a fixed context: a sliding window, of which the second half is scored."""
    half = context // 2
    stride = context - half
    return [Reading(first, min(first + stride, num_bytes), half) for first in range(0, num_bytes, stride)]


def streams(num_bytes: int, lanes: int, warm: int) -> list[Reading]:
    """For models with carried state: contiguous pieces, each read after `warm` bytes before it."""
    lanes = min(lanes, num_bytes)
    edges = [num_bytes * lane // lanes for lane in range(lanes + 1)]
    return [Reading(first, end, warm) for first, end in itertools.pairwise(edges)]


def check_reach(readings: list[Reading], bytes_before: int) -> int:
    """The number of bytes read before the test; `UserError` if there are fewer."""
    reach = max(reading.warm for reading in readings) + 1
    if bytes_before < reach:
        raise UserError(
            f"{reach:,} bytes must come before the scored part, not {bytes_before:,}: use more text"
        )
    return reach


@torch.no_grad()
def nats(
    read: Read,
    before: np.ndarray,
    test: np.ndarray,
    readings: list[Reading],
    *,
    batch_size: int,
    block_length: int,
    device: torch.device,
) -> float:
    """The sum over all bytes of `test`, which follows the text `before`."""
    reach = check_reach(readings, len(before))
    text = np.concatenate([before[len(before) - reach :], test])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group in _alike(readings, batch_size):
        rows = [text[reach + r.first - r.warm - 1 : reach + r.end] for r in group]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        warm, carried = group[0].warm, None
        for start in range(0, group[0].length, block_length):
            end = min(start + block_length, group[0].length)
            nll_BT, carried = read(tokens[:, start:end], tokens[:, start + 1 : end + 1], carried)
            total += nll_BT[:, max(0, warm - start) :].sum(dtype=torch.float64)
    return float(total)


def _alike(readings: list[Reading], most: int) -> Iterator[list[Reading]]:
    """Groups of readings of equal length, at most `most` each."""
    for _, alike in itertools.groupby(readings, key=lambda reading: (reading.warm, reading.length)):
        while group := list(itertools.islice(alike, most)):
            yield group
