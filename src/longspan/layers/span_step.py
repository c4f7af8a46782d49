"""Attention with learned spans for one token after another, on a CPU, while the weights stay fixed.

The small operations around a single token take longer than reading the weights. So there are as few as
possible: what does not depend on the token is prepared once, new keys and values are written beside the old.

Shapes: B batch, M memory, D width, H heads, G heads of a group, X = 2G, K head width, W window,
N = G x B rows, one for every head and text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longspan.kernels.linear import FixedProduct
from longspan.kernels.span_attention.mask import EPSILON

ROOM = 256
"""So many tokens are read until what the heads see has to be moved."""

GROUP = 4096
"""To compute heads apart takes as long as reading this many keys and values of one head."""


class SpanStep:
    """`Attention.forward` for single tokens, h_1BD -> h_1BD. The weights have heads in the groups' order."""

    def __init__(
        self,
        groups: Sequence[HeadsOfOneWindow],
        qkv_weight: Tensor,
        out_weight: Tensor,
        *,
        norm: nn.Module,
        norm_first: bool,
    ) -> None:
        self._groups = groups
        self._sizes = [group.num_heads for group in groups]
        self._project, self._merge = FixedProduct(qkv_weight), FixedProduct(out_weight)
        self._norm, self._norm_first = norm, norm_first

    def __call__(self, h_1BD: Tensor) -> Tensor:
        x_1BD = self._norm(h_1BD) if self._norm_first else h_1BD
        batch, num_heads = h_1BD.shape[1], sum(self._sizes)
        qkv_3HBK = self._project(x_1BD).view(batch, 3, num_heads, -1).permute(1, 2, 0, 3)
        parts = qkv_3HBK.split(self._sizes, dim=1)
        found = [group(part_3GBK) for group, part_3GBK in zip(self._groups, parts, strict=True)]
        found_HBK = torch.cat(found).view(num_heads, batch, -1)
        out_1BD = h_1BD + self._merge(found_HBK.transpose(0, 1).reshape(1, batch, -1))
        return out_1BD if self._norm_first else self._norm(out_1BD)


class HeadsOfOneWindow:
    """A group of heads and what they remember: `span_attention` of the kernels, for single tokens.

    Rows lie nearest first, as the keys of the distances do, with room before them for what is read next.
    """

    def __init__(self, kv_BMXK: Tensor, mask_GW: Tensor, position_keys_WK: Tensor) -> None:
        batch, width = kv_BMXK.shape[0], kv_BMXK.shape[-1]
        self.num_heads, self._window = mask_GW.shape
        rows = self.num_heads * batch
        self._kv_2NRK = kv_BMXK.new_zeros(2, rows, ROOM + self._window, width)
        self._keys_NKR, self._values_NRK = self._kv_2NRK[0].mT, self._kv_2NRK[1]
        near_XBMK = kv_BMXK.flip(1).permute(2, 0, 1, 3)[:, :, : self._window]
        self._start = ROOM
        self._kv_2NRK[:, :, ROOM : ROOM + near_XBMK.shape[2]] = near_XBMK.reshape(2, rows, -1, width)
        self._mask_N1W = mask_GW.repeat_interleave(batch, dim=0)[:, None]
        self._position_keys_NKW = position_keys_WK.mT.expand(rows, -1, -1)
        self._scale = 1 / math.sqrt(width)

    def __call__(self, qkv_3GBK: Tensor) -> Tensor:
        """[N, 1, K]"""
        qkv_3N1K = qkv_3GBK.flatten(1, 2).unsqueeze(2)
        q_N1K = qkv_3N1K[0]
        k_NKW = self._keys_NKR.narrow(2, self._start, self._window)
        v_NWK = self._values_NRK.narrow(1, self._start, self._window)
        scores_N1W = torch.bmm(q_N1K, self._position_keys_NKW)
        scores_N1W.baddbmm_(q_N1K, k_NKW, beta=self._scale, alpha=self._scale)
        a_N1W = scores_N1W.softmax(-1).mul_(self._mask_N1W)
        out_N1K = torch.bmm(a_N1W, v_NWK).div_(a_N1W.sum(-1, keepdim=True).add_(EPSILON))
        self._remember(qkv_3N1K[1:])
        return out_N1K

    def _remember(self, kv_2N1K: Tensor) -> None:
        if self._start == 0:
            self._kv_2NRK[:, :, ROOM:] = self._kv_2NRK[:, :, : self._window].clone()
            self._start = ROOM
        self._start -= 1
        self._kv_2NRK.narrow(2, self._start, 1).copy_(kv_2N1K)


def step_groups(windows: Sequence[int]) -> list[list[int]]:
    """Which heads to compute together, each over the longest window of its group."""
    groups: list[list[int]] = []
    for head in sorted(range(len(windows)), key=windows.__getitem__):
        if not groups or len(groups[-1]) * (windows[head] - windows[groups[-1][-1]]) > GROUP:
            groups.append([])
        groups[-1].append(head)
    return groups
