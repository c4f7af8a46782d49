"""The specification of span attention: one query, one head, one distance at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspan.kernels.span_attention.context import EPSILON, AttentionContext


def span_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """As described in the package's docstring, without dropout; gradients come from autograd."""
    outs = []
    for heads, group in context.groups():
        past_k_BGMK, past_v_BGMK = group.past[0].transpose(1, 2).chunk(2, dim=1)
        k_BGSK = torch.cat([past_k_BGMK, k_BHTK[:, heads]], dim=2)
        v_BGSK = torch.cat([past_v_BGMK, v_BHTK[:, heads]], dim=2)
        outs.append(_group(q_BHTK[:, heads], k_BGSK, v_BGSK, group))
    return torch.cat(outs, dim=1)


def _group(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, context: AttentionContext) -> Tensor:
    """Heads with their keys and values, those of the past first."""
    batch, heads, block, width = q_BHTK.shape
    num_keys = k_BHSK.shape[2]
    nothing = torch.zeros_like(q_BHTK[0, 0, 0])
    rows = []
    for b in range(batch):
        for h in range(heads):
            for t in range(block):
                q = asked = q_BHTK[b, h, t]
                if context.content_bias_HK is not None:
                    q = q + context.content_bias_HK[h]
                if context.position_bias_HK is not None:
                    asked = asked + context.position_bias_HK[h]
                if context.position_map_HKE is not None:
                    asked = asked @ context.position_map_HKE[h]
                scores, values, mask = [], [], []
                for i in range(context.windows[h]):
                    distance = context.first_distance + i
                    if context.filled_B is not None and distance > t + context.filled_B[b]:
                        continue
                    key = num_keys - block + t - distance
                    k, v = (k_BHSK[b, h, key], v_BHSK[b, h, key]) if key >= 0 else (nothing, nothing)
                    score = q @ k
                    if context.position_keys is not None:
                        keys = context.position_keys
                        p_LK = keys if keys.dim() == 2 else keys[h]
                        score = score + asked @ p_LK[i]
                    scores.append(score / math.sqrt(width))
                    values.append(v)
                    if context.spans is not None:
                        span = context.spans[h] if context.spans.dim() == 1 else context.spans[b, h, t]
                        mask.append(((span - i) / context.ramp + 1).clamp(0, 1))
                if context.persistent is not None:
                    for k, v in zip(context.persistent[0][h], context.persistent[1][h], strict=True):
                        scores.append(q @ k / math.sqrt(width))
                        values.append(v)
                        mask.append(torch.ones_like(scores[-1]))
                weights = torch.softmax(torch.stack(scores), dim=0)
                if context.spans is not None:
                    weights = weights * torch.stack(mask)
                    if context.renormalise:
                        weights = weights / (weights.sum() + EPSILON)
                rows.append(weights @ torch.stack(values))
    return torch.stack(rows).view(batch, heads, block, width)
