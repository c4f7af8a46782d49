"""What every token of a text costs, and how far back each head looks at it; block by block.

The text may have any length: what is kept between two blocks is the state and sums over the tokens.
Shapes: T tokens of a block, L layers, H heads, W distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.inspection.attention import Weights, mean_distance, reach, weights_in_chunks
from longspan.inspection.attention_by_distance import MeanAttention, add_weights, mean_of
from longspan.layers.recording import recording
from longspan.reading import READ_BLOCK, TextState, nats_of

if TYPE_CHECKING:
    from longspan.models.interface import LanguageModel

PART = 0.9  # the 90th percentile of the distance
_LONG_BLOCK = 2048  # tokens, where attention is not measured
_MOST_LOGITS = 1 << 23  # of a block
Chunk = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerReach:
    """How far back the heads of one layer look at every token of a block."""

    name: str  # of the module
    mean_HT: Tensor  # mean distance in tokens; nan if all weight lies on persistent vectors
    reach_HT: Tensor  # the distance within which 90% of the weight lies
    top_HTK: Tensor  # the distances with the largest weights, the largest first
    top_weights_HTK: Tensor


@dataclass(frozen=True)
class Block:
    """Some tokens of a text that follow each other."""

    first: int  # number of the first token in the text
    ids: list[int]
    bits: list[float]
    layers: list[LayerReach]  # empty if attention is not measured here


@dataclass
class Totals:
    """Sums over the blocks so far."""

    tokens: int = 0
    bits: float = 0.0
    attention_tokens: int = 0
    sums: dict[str, Weights] = field(default_factory=dict)

    def attention(self) -> MeanAttention | None:
        """The mean over all tokens whose attention was measured; None without attention."""
        return mean_of(self.sums, self.attention_tokens) if self.sums else None


def inspect_blocks(
    model: LanguageModel,
    chunks: Iterable[Chunk],
    before: TextState,
    totals: Totals,
    *,
    attention_tokens: int | None = None,
    largest: int = 0,
) -> Iterator[Block]:
    """The blocks of a text that follows `before`; `totals` are those of all blocks so far.

    Attention is measured over the first `attention_tokens` tokens (None: over all of them). `largest` is the
    number of distances with the largest weights that are kept for every head.
    """

    def is_measured() -> bool:
        return attention_tokens is None or totals.tokens < attention_tokens

    longest = _longest_block(model)
    for ids in _in_blocks(chunks, lambda: READ_BLOCK if is_measured() else longest):
        measured = is_measured()
        layers: list[LayerReach] = []
        if measured:
            with recording() as kept:
                nats, before = nats_of(model, ids, before)
            for name, module in model.named_modules():
                for inputs in kept.get(module, ()):
                    layers.append(_layer(name, weights_in_chunks(module, inputs), totals, largest))
            totals.attention_tokens += len(ids)
        else:
            nats, before = nats_of(model, ids, before, longest)
        bits = [one / math.log(2) for one in nats]
        yield Block(totals.tokens, ids.tolist(), bits, layers)
        totals.tokens += len(ids)
        totals.bits += math.fsum(bits)


def _layer(name: str, chunks: Iterable[Weights], totals: Totals, largest: int) -> LayerReach:
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for weights_HTW, persistent_HTP in chunks:
        weights_HTW = weights_HTW.double()
        persistent_H = None if persistent_HTP is None else persistent_HTP.double().sum((1, 2)).cpu()
        add_weights(totals.sums, name, weights_HTW.sum(1).cpu(), persistent_H)
        top = _largest(weights_HTW, largest)
        found.append((mean_distance(weights_HTW).cpu(), reach(weights_HTW, PART).cpu(), *top))
    return LayerReach(name, *(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


def _largest(weights_HTW: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Distances and weights; a head that sees fewer than `largest` tokens has weights of 0."""
    count = min(largest, weights_HTW.shape[2])
    values, distances = weights_HTW.topk(count, dim=2)
    missing = (0, largest - count)
    return tuple(torch.nn.functional.pad(x.cpu(), missing) for x in (distances, values))  # type: ignore[return-value]


def _longest_block(model: LanguageModel) -> int:
    """Longer blocks are faster. The bits are the same only if the model does not depend on the blocks."""
    if not model.block_invariant:
        return READ_BLOCK
    return max(READ_BLOCK, min(_LONG_BLOCK, _MOST_LOGITS // model.vocabulary_size))


def _in_blocks(chunks: Iterable[Chunk], length: Callable[[], int]) -> Iterator[Chunk]:
    """The same tokens in blocks of `length()`, which may change; the last one may be shorter."""
    rest = np.empty(0, dtype=np.int64)
    for chunk in chunks:
        rest = np.concatenate([rest, chunk.astype(np.int64)])
        while len(rest) >= (size := length()):
            yield rest[:size]
            rest = rest[size:]
    if len(rest):
        yield rest
