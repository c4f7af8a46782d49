"""Positions and distances in attention.

Shapes: H heads, G some of them, W window, L longest distance, K head width, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.kernels.qk_norm_rope import Rope
from longspan.layers.select_heads import select_heads


class Terms(NamedTuple):
    """The terms of distance in attention's score, with the names of `AttentionContext`."""

    position_keys: Tensor | None = None
    content_bias_HK: Tensor | None = None
    position_bias_HK: Tensor | None = None
    position_map_HKE: Tensor | None = None


class Positions(nn.Module, ABC):
    """The term that attention adds to the content score: the product of a query and a distance key."""

    shared: bool
    """Whether all layers use the same object, which the model then owns."""

    has_keys: bool = True
    """Whether there is a key for every distance in a window."""

    rope: Rope | None = None
    """The rotation of RoPE; None without it."""

    @property
    def counts(self) -> bool:
        """Whether the state counts the tokens that were read; needed only by RoPE."""
        return self.rope is not None

    @abstractmethod
    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        """The terms of some of the heads, for `num_queries` queries and the `window` nearest distances."""


class NoPositions(Positions):
    """No positions: the score depends only on the content of a key."""

    shared = False
    has_keys = False

    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        return Terms()


class LearnedDistanceKeys(Positions):
    """One learned key per distance, shared by all heads of every layer. The model owns this module.

    A query at distance d from a key adds q . p_d to its score. Row i belongs to the i-th nearest distance.
    """

    shared = True

    def __init__(self, limit: int, head_width: int) -> None:
        super().__init__()
        self.keys_LK = nn.Parameter(torch.randn(limit, head_width))

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"no_decay": [self.keys_LK]}

    def forward(self) -> Tensor:
        """The keys, [L, K], nearest distance first."""
        return self.keys_LK

    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        return Terms(self.keys_LK)


class QueryBiases(nn.Module):
    """u and v: biases added to all queries of a head, in the content term and in the distance term."""

    def __init__(self, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.content_HK = nn.Parameter(torch.zeros(num_heads, head_width))
        self.distance_HK = nn.Parameter(torch.zeros(num_heads, head_width))

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"no_decay": [self.content_HK, self.distance_HK]}


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

    @property
    def content_bias(self) -> Tensor:
        """u, [H, K]."""
        return self._biases[0].content_HK

    @property
    def position_bias(self) -> Tensor:
        """v, [H, K]."""
        return self._biases[0].distance_HK

    def forward(self, window: int) -> Tensor:
        """r_d of every head for the distances 0 ... window - 1, [H, W, K]."""
        weight_HKD = torch.unflatten(self.project.weight, 0, (self.num_heads, -1))
        return self._dropped_waves(window) @ weight_HKD.mT

    def _dropped_waves(self, window: int) -> Tensor:
        weight = self.project.weight
        longest = 1 << (window - 1).bit_length()
        waves_WD = _waves(longest, weight.shape[1], self.clamp, weight.device)[:window].to(weight.dtype)
        return F.dropout(waves_WD, self.dropout, self.training)

    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        u_GK, v_GK = (select_heads(x, heads) for x in (self.content_bias, self.position_bias))
        weight_GKD = select_heads(torch.unflatten(self.project.weight, 0, (self.num_heads, -1)), heads)
        head_width, width = weight_GKD.shape[1:]
        waves_WD = self._dropped_waves(window)
        # (q R) . sinusoid = q . (R sinusoid): when few queries look far back, as in decoding, project them.
        if num_queries * width * (head_width + window) < window * head_width * (width + num_queries):
            return Terms(waves_WD, u_GK, v_GK, weight_GKD)
        return Terms(waves_WD @ weight_GKD.mT, u_GK, v_GK)


@cache  # never freed: a CUDA graph reads them at their address
def _waves(longest: int, width: int, clamp: int | None, device: torch.device) -> Tensor:
    """The sinusoids of all distances below a power of two, so that there are few such tables."""
    with torch.inference_mode(False):  # the first call may be in inference mode, a later one in training
        return sinusoids(torch.arange(longest, device=device).clamp(0, clamp), width)


def sinusoids(position_W: Tensor, width: int) -> Tensor:
    """[sin(f_0 x), sin(f_1 x), ..., cos(f_0 x), cos(f_1 x), ...] with f_i = 10000^(-2i/width), [W, D]."""
    even = torch.arange(0, width, 2, device=position_W.device, dtype=torch.float32)
    angle_WE = position_W[:, None] * (1 / 10000 ** (even / width))
    return torch.cat([angle_WE.sin(), angle_WE.cos()], dim=-1)
