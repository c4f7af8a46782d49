"""Reading, scoring and inspecting a text in units, between which an engine serves others."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from longspan.inspection.surprise import Totals, inspect_blocks
from longspan.reading import TextState, blocks, nats_in_blocks

if TYPE_CHECKING:
    from longspan.models import LanguageModel

T = TypeVar("T")
Reading: TypeAlias = Generator[int, None, T]
"""Work in units: it yields the number of tokens of every unit and returns its result."""

Numbers: TypeAlias = "list[list[float | None]]"

_one_at_a_time = threading.Lock()  # attention is recorded for the whole process


@dataclass(frozen=True)
class InspectedLayer:
    """How far back the heads of a layer look: lists over heads of lists over tokens; None: not a number."""

    name: str
    mean_distance: Numbers
    reach: Numbers  # within which 90% of the weight lies


@dataclass(frozen=True)
class InspectedText:
    """The bits of every token of a text, and where each head looks."""

    ids: list[int]
    bits: list[float]
    layers: list[InspectedLayer]


def read_text(
    model: LanguageModel, ids: Sequence[int], before: TextState | None, length: int | None = None
) -> Reading[TextState]:
    """The state after a text, which may be empty if there is a text before it."""
    for hidden_TD, after in blocks(model, ids, before, length):
        before = after
        yield len(hidden_TD)
    if before is None:
        raise ValueError("a text begins with at least one token")
    return before


def scored(
    model: LanguageModel, ids: Sequence[int], before: TextState
) -> Reading[tuple[list[float], TextState]]:
    """The nats of each token, and the state after them."""
    nats, after = list[float](), before
    for of_block, after in nats_in_blocks(model, ids, before):  # noqa: B007 (the last one is returned)
        nats += of_block
        yield len(of_block)
    return nats, after


def inspected(model: LanguageModel, ids: Sequence[int], before: TextState) -> Reading[InspectedText]:
    """Bits and attention of a whole text."""
    found = InspectedText([], [], [])
    blocks_of_text = inspect_blocks(model, [np.array(ids, dtype=np.int64)], before, Totals())
    while True:
        with _one_at_a_time:
            block = next(blocks_of_text, None)
        if block is None:
            return found
        found.ids.extend(block.ids)
        found.bits.extend(block.bits)
        for number, layer in enumerate(block.layers):
            if number == len(found.layers):
                empty = [InspectedLayer(layer.name, [[] for _ in layer.mean_HT], [[] for _ in layer.mean_HT])]
                found.layers.extend(empty)
            _extend(found.layers[number].mean_distance, layer.mean_HT)
            _extend(found.layers[number].reach, layer.reach_HT)
        yield len(block.ids)


def _extend(numbers: Numbers, more_HT: Tensor) -> None:
    for of_head, more in zip(numbers, more_HT.tolist(), strict=True):
        of_head.extend(None if math.isnan(one) else one for one in more)
