"""Span attention of one query per text, in plain torch and without gradients: a step of decoding.

Keys and values of the past are read where they lie, and only as far back as the heads of a group see.

Shapes: as in the package; T is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.span_attention.mask import EPSILON, soft_mask
from longspan.kernels.span_attention.queries import biased, position_queries


def span_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    past: Sequence[Tensor],
    windows: Sequence[int],
    position_keys: Tensor | None,
    content_bias_HK: Tensor | None,
    position_bias_HK: Tensor | None,
    position_map_HKE: Tensor | None,
    filled_B: Tensor | None,
    persistent: tuple[Tensor, Tensor] | None,
    spans_H: Tensor | None,
    ramp: int,
    renormalise: bool,
    first_distance: int,
) -> Tensor:
    """As the package's `span_attention` says, for a single query, [B, H, T, K]; distances oldest first."""
    width, longest = q_BHTK.shape[-1], max(windows)
    distance_BHTL = mask_HL = None
    if position_keys is not None:
        asking = position_queries(q_BHTK, position_bias_HK, position_map_HKE) / math.sqrt(width)
        distance_BHTL = (asking @ position_keys[..., :longest, :].to(asking.dtype).mT).flip(-1)
    q_BHTK = biased(q_BHTK, content_bias_HK) / math.sqrt(width)
    if spans_H is not None:
        mask_HL = soft_mask(spans_H, ramp, longest).flip(1)
    persistent_k_HPK, persistent_v_HPK = (
        (None, None) if persistent is None else (x.to(q_BHTK.dtype) for x in persistent)
    )
    out, start = [], 0
    for kv_BMXK in past:
        heads = slice(start, start + kv_BMXK.shape[2] // 2)
        start, window = heads.stop, max(windows[heads])
        sees_itself = first_distance == 0
        k_BGMK, v_BGMK = _near(kv_BMXK, window - sees_itself).transpose(1, 2).chunk(2, dim=1)
        scores = [_for_each_text(q_BHTK[:, heads], k_BGMK.mT)]
        if sees_itself:
            scores.append((q_BHTK[:, heads] * k_BHTK[:, heads]).sum(-1, keepdim=True))
        scores_BGTW = _joined(scores)
        if distance_BHTL is not None:
            scores_BGTW += distance_BHTL[:, heads, :, -window:]
        if filled_B is not None:
            distance_W = torch.arange(window - 1, -1, -1, device=filled_B.device)
            scores_BGTW.masked_fill_((distance_W > filled_B[:, None])[:, None, None], -math.inf)
        scores = [scores_BGTW]
        if persistent_k_HPK is not None:
            scores.append(q_BHTK[:, heads] @ persistent_k_HPK[heads].mT)
        exact = torch.promote_types(q_BHTK.dtype, torch.float32)
        a_BGTX = torch.softmax(_joined(scores), dim=-1, dtype=exact)
        if mask_HL is not None:
            a_BGTX[..., :window] *= mask_HL[heads, None, -window:]
        used_BGTX = a_BGTX.to(q_BHTK.dtype)
        out_BGTK = _for_each_text(used_BGTX[..., : k_BGMK.shape[2]], v_BGMK)
        if sees_itself:
            out_BGTK += used_BGTX[..., window - 1 : window] * v_BHTK[:, heads]
        if persistent_v_HPK is not None:
            out_BGTK += used_BGTX[..., window:] @ persistent_v_HPK[heads]
        if mask_HL is not None and renormalise:
            out_BGTK /= a_BGTX.sum(-1, keepdim=True) + EPSILON
        out.append(out_BGTK)
    return _joined(out, dim=1)


def _near(kv_BMXK: Tensor, rows: int) -> Tensor:
    """The last so many rows; zeros stand in for what lies before the first."""
    missing = rows - kv_BMXK.shape[1]
    if missing > 0:
        return F.pad(kv_BMXK, (0, 0, 0, 0, missing, 0))
    return kv_BMXK[:, -missing:]


def _for_each_text(x_BGTX: Tensor, y_BGXY: Tensor) -> Tensor:
    """x y. The matrices of all texts would have to be copied to be one stack: that costs more than a loop."""
    return torch.stack([torch.bmm(x_GTX, y_GXY) for x_GTX, y_GXY in zip(x_BGTX, y_BGXY, strict=True)])


def _joined(parts: list[Tensor], dim: int = -1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
