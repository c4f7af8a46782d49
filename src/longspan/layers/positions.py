"""How distance counts in attention.

Shapes: B batch, H heads, G heads of a group, T block, W window, L longest distance, K head width, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Positions(nn.Module, ABC):
    """What attention adds to the score of content: the product of a query and a key of the distance."""

    shared: bool
    """Whether all layers use the same object, which the model then owns."""

    @abstractmethod
    def keys(self, window: int, heads: list[int]) -> Tensor:
        """Keys of the nearest distances, nearest first: [L, K] for all heads alike, or [G, W, K]."""

    def queries(self, q_BGTK: Tensor, heads: list[int]) -> tuple[Tensor, Tensor | None]:
        """The queries of the content, and those of the distance where they differ."""
        return q_BGTK, None


class LearnedDistanceKeys(Positions):
    """One learned key per distance, shared by all heads of every layer. The model owns this module.

    A query at distance d from a key adds q . p_d to its score. Row i belongs to the i-th nearest distance.
    """

    shared = True

    def __init__(self, limit: int, head_width: int) -> None:
        super().__init__()
        self.keys_LK = nn.Parameter(torch.randn(limit, head_width))

    def keys(self, window: int, heads: list[int]) -> Tensor:
        return self.keys_LK


class QueryBiases(nn.Module):
    """u and v: what every query of a head asks for, in the content and in the distance."""

    def __init__(self, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.content_HK = nn.Parameter(torch.zeros(num_heads, head_width))
        self.distance_HK = nn.Parameter(torch.zeros(num_heads, head_width))


class SinusoidDistances(Positions):
    """Transformer-XL (Dai et al., 2019, section 3.3): (q + u) . k + (q + v) . r_d, with r_d = R sinusoid(d).

    The nearest distance is 0. Beyond `clamp` all distances count as `clamp`. R belongs to the layer; u and v
    too, unless `biases` are given, which all layers then share and the model owns.
    """

    shared = False

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        *,
        biases: QueryBiases | None = None,
        clamp: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(width, num_heads * head_width, bias=False)
        self.num_heads = num_heads
        self.clamp = clamp
        self.dropout = dropout
        if biases is None:
            self.biases = biases = QueryBiases(num_heads, head_width)
        self._biases = (biases,)  # in a tuple shared ones are not registered again

    def keys(self, window: int, heads: list[int]) -> Tensor:
        weight_HKD = torch.unflatten(self.project.weight, 0, (self.num_heads, -1))[heads]
        distance_W = torch.arange(window, device=weight_HKD.device)
        waves_WD = sinusoids(distance_W.clamp(0, self.clamp), weight_HKD.shape[-1]).to(weight_HKD.dtype)
        return F.dropout(waves_WD, self.dropout, self.training) @ weight_HKD.mT

    def queries(self, q_BGTK: Tensor, heads: list[int]) -> tuple[Tensor, Tensor | None]:
        u_HK, v_HK = self._biases[0].content_HK, self._biases[0].distance_HK
        return q_BGTK + u_HK[heads, None], q_BGTK + v_HK[heads, None]


def sinusoids(position_W: Tensor, width: int) -> Tensor:
    """[sin(f_0 x), sin(f_1 x), ..., cos(f_0 x), cos(f_1 x), ...] with f_i = 10000^(-2i/width), [W, D]."""
    even = torch.arange(0, width, 2, device=position_W.device, dtype=torch.float32)
    angle_WE = position_W[:, None] * (1 / 10000 ** (even / width))
    return torch.cat([angle_WE.sin(), angle_WE.cos()], dim=-1)
