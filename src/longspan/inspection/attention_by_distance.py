"""The mean attention weight of every head over the distance, as a running sum over the blocks of a text.

Shapes: L layers, H heads, W distances, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import UserError
from longspan.inspection.attention import Weights, mean_distance, reach, recorded, weights_in_chunks
from longspan.reading import Ids, TextState

if TYPE_CHECKING:
    from longspan.models.interface import LanguageModel


@dataclass(frozen=True)
class MeanAttention:
    """The mean over the tokens of a text of the weights that the heads used.

    `weights_LHW[l, h, d]` is the mean weight of the token d places back; d = 0 is the token itself, and the
    last distance is the furthest with any weight. `persistent_LH` is the mean weight of all persistent
    vectors together; None if the model has none. Both add up to 1 for every head, unless the soft mask is not
    renormalised. A layer with fewer heads than others has nan in place of the missing ones.
    """

    layers: tuple[str, ...]  # names of the modules
    weights_LHW: Tensor  # float64, on the CPU
    persistent_LH: Tensor | None
    tokens: int

    @property
    def mean_distance_LH(self) -> Tensor:
        """How far back a head looks on average, in tokens; persistent vectors have no distance."""
        return mean_distance(self.weights_LHW)

    def reach_LH(self, part: float = 0.9) -> Tensor:
        """The distance within which a head has this part of its weight."""
        return reach(self.weights_LHW, part)

    def heads(self) -> Iterator[tuple[int, int]]:
        """Layer and head, from 0, of every head that exists."""
        exists_LH = ~self.weights_LHW[:, :, 0].isnan()
        return ((layer, head) for layer, head in exists_LH.nonzero().tolist())

    def as_json(self) -> dict[str, Any]:
        """Plain numbers; the weights of a head end at its furthest distance with any weight."""
        layers: list[dict[str, Any]] = [{"module": name, "heads": []} for name in self.layers]
        means_LH, half_LH, most_LH = self.mean_distance_LH, self.reach_LH(0.5), self.reach_LH(0.9)
        for layer, head in self.heads():
            persistent = None if self.persistent_LH is None else float(self.persistent_LH[layer, head])
            weights_W = self.weights_LHW[layer, head]
            mean = float(means_LH[layer, head])
            layers[layer]["heads"].append(
                {
                    "mean_distance": mean if mean == mean else None,  # JSON has no nan
                    "reach_50": int(half_LH[layer, head]),
                    "reach_90": int(most_LH[layer, head]),
                    "persistent": persistent,
                    "weights": weights_W[: _last(weights_W) + 1].tolist(),
                }
            )
        return {"tokens": self.tokens, "layers": layers}


def mean_attention(
    model: LanguageModel,
    ids: Ids,
    before: TextState | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MeanAttention:
    """The mean weight over distance for a text of any length, in bounded memory.

    `progress(done, total)` is called after every block with the number of tokens.
    """
    sums: dict[str, Weights] = {}
    done = 0
    with closing(recorded(model, ids, before)) as read:
        for tokens, calls in read:
            if not calls:
                raise UserError("this model has no attention: there are no weights to show")
            for name, layer, inputs in calls:
                for weights_HTW, persistent_HTP in weights_in_chunks(layer, inputs):
                    persistent_H = (
                        None if persistent_HTP is None else persistent_HTP.double().sum((1, 2)).cpu()
                    )
                    add_weights(sums, name, weights_HTW.double().sum(1).cpu(), persistent_H)
            done += tokens
            if progress is not None:
                progress(done, len(ids))
    if not done:
        raise UserError("the text is empty: attention needs at least one token")
    return mean_of(sums, done)


def add_weights(sums: dict[str, Weights], name: str, weights_HW: Tensor, persistent_H: Tensor | None) -> None:
    """Add the weights of some tokens, summed over them, to those of the layer `name`."""
    if name in sums:
        before_HW, before_H = sums[name]
        width = max(before_HW.shape[1], weights_HW.shape[1])
        weights_HW = _padded(before_HW, width) + _padded(weights_HW, width)
        persistent_H = persistent_H if before_H is None or persistent_H is None else before_H + persistent_H
    sums[name] = weights_HW, persistent_H


def mean_of(sums: dict[str, Weights], tokens: int) -> MeanAttention:
    """The mean over so many tokens."""
    num_heads = max(weights_HW.shape[0] for weights_HW, _ in sums.values())
    width = 1 + max(_last(weights_W) for weights_HW, _ in sums.values() for weights_W in weights_HW)
    shape = (len(sums), num_heads)
    weights_LHW = torch.full((*shape, width), torch.nan, dtype=torch.float64)
    persistent_LH = torch.full(shape, torch.nan, dtype=torch.float64)
    for layer, (weights_HW, persistent_H) in enumerate(sums.values()):
        heads = weights_HW.shape[0]
        weights_LHW[layer, :heads] = _padded(weights_HW, width)[:, :width] / tokens
        persistent_LH[layer, :heads] = 0 if persistent_H is None else persistent_H / tokens
    has_persistent = any(persistent_H is not None for _, persistent_H in sums.values())
    return MeanAttention(tuple(sums), weights_LHW, persistent_LH if has_persistent else None, tokens)


def _padded(weights_HW: Tensor, width: int) -> Tensor:
    return F.pad(weights_HW, (0, max(0, width - weights_HW.shape[1])))


def _last(weights_W: Tensor) -> int:
    """The furthest distance with any weight; 0 if there is none."""
    return int(weights_W.nonzero().max()) if weights_W.any() else 0
