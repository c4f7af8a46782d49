"""The specification of span attention: one query, one head, one distance at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspan.kernels.span_attention.mask import EPSILON


def span_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    window: int,
    position_keys: Tensor | None = None,
    content_bias_HK: Tensor | None = None,
    position_bias_HK: Tensor | None = None,
    position_map_HKE: Tensor | None = None,
    filled_B: Tensor | None = None,
    persistent: tuple[Tensor, Tensor] | None = None,
    spans_H: Tensor | None = None,
    ramp: int = 1,
    renormalise: bool = True,
    first_distance: int = 1,
) -> Tensor:
    """As described in the package's docstring, without dropout; gradients come from autograd."""
    batch, heads, block, width = q_BHTK.shape
    num_keys = k_BHSK.shape[2]
    nothing = torch.zeros_like(q_BHTK[0, 0, 0])
    rows = []
    for b in range(batch):
        for h in range(heads):
            for t in range(block):
                q = asked = q_BHTK[b, h, t]
                if content_bias_HK is not None:
                    q = q + content_bias_HK[h]
                if position_bias_HK is not None:
                    asked = asked + position_bias_HK[h]
                if position_map_HKE is not None:
                    asked = asked @ position_map_HKE[h]
                scores, values, mask = [], [], []
                for i in range(window):
                    distance = first_distance + i
                    if filled_B is not None and distance > t + filled_B[b]:
                        continue
                    key = num_keys - block + t - distance
                    k, v = (k_BHSK[b, h, key], v_BHSK[b, h, key]) if key >= 0 else (nothing, nothing)
                    score = q @ k
                    if position_keys is not None:
                        p_LK = position_keys if position_keys.dim() == 2 else position_keys[h]
                        score = score + asked @ p_LK[i]
                    scores.append(score / math.sqrt(width))
                    values.append(v)
                    if spans_H is not None:
                        mask.append(((spans_H[h] - i) / ramp + 1).clamp(0, 1))
                if persistent is not None:
                    for persistent_k, persistent_v in zip(persistent[0][h], persistent[1][h], strict=True):
                        scores.append(q @ persistent_k / math.sqrt(width))
                        values.append(persistent_v)
                        mask.append(torch.ones_like(scores[-1]))
                weights = torch.softmax(torch.stack(scores), dim=0)
                if spans_H is not None:
                    weights = weights * torch.stack(mask)
                    if renormalise:
                        weights = weights / (weights.sum() + EPSILON)
                rows.append(weights @ torch.stack(values))
    return torch.stack(rows).view(batch, heads, block, width)
