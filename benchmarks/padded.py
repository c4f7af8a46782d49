"""Span attention as the original code computes it: the baseline of benchmarks/train_cpu.py.

All heads share the longest window. Scores of all T x (W + T) pairs of a query and a key are computed and
kept, and copied from key layout to distance layout and back. Gradients come from autograd.

Shapes: as in longspan.kernels.span_attention, and N = B x H (heads count as batch), S keys of memory and
block, X = W + P.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.span_attention import AttentionContext, soft_mask
from longspan.kernels.span_attention.context import EPSILON


def span_attention(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, context: AttentionContext) -> Tensor:
    """Like the package's function, but keys and values include the memory, which is not in the context."""
    heads, block, width = q_BHTK.shape[1:]
    window = max(context.windows)
    seen = window - 1 + context.first_distance + block
    k_NSK, v_NSK = (_last_rows(x_BHSK.flatten(0, 1), seen) for x_BHSK in (k_BHSK, v_BHSK))
    content_q_BHTK = context.content_queries(q_BHTK)
    scores_NTX = _by_distance(content_q_BHTK.flatten(0, 1) @ k_NSK.mT, window)
    if context.position_keys is not None:
        asked = context.position_queries(q_BHTK)
        position_keys_WK = context.position_keys[..., :window, :].flip(-2).to(asked.dtype)
        scores_NTX = scores_NTX + (asked @ position_keys_WK.mT).flatten(0, 1)
    if context.filled_B is not None:
        scores_NTX = scores_NTX.masked_fill(_unfilled(context.filled_B, heads, block, window), -torch.inf)
    if context.persistent is not None:
        persistent_scores_BHTP = content_q_BHTK @ context.persistent[0].to(q_BHTK.dtype).mT
        scores_NTX = torch.cat([scores_NTX, persistent_scores_BHTP.flatten(0, 1)], dim=-1)
    weights_NTX = torch.softmax(scores_NTX / math.sqrt(width), dim=-1)
    if context.spans is not None:
        mask_HX = soft_mask(context.spans, context.ramp, window).flip(1)
        if context.persistent is not None:
            mask_HX = F.pad(mask_HX, (0, context.persistent[0].shape[1]), value=1.0)
        weights_NTX = (weights_NTX.unflatten(0, (-1, heads)) * mask_HX[:, None]).flatten(0, 1)
        if context.renormalise:
            weights_NTX = weights_NTX / (weights_NTX.sum(-1, keepdim=True) + EPSILON)
    weights_NTX = F.dropout(weights_NTX, context.dropout).to(v_NSK.dtype)
    out_NTK = _by_key(weights_NTX[..., :window], k_NSK.shape[1]) @ v_NSK
    out_BHTK = out_NTK.unflatten(0, (-1, heads))
    if context.persistent is not None:
        persistent_weights_BHTP = weights_NTX[..., window:].unflatten(0, (-1, heads))
        out_BHTK = out_BHTK + persistent_weights_BHTP @ context.persistent[1].to(v_NSK.dtype)
    return out_BHTK


def _last_rows(x_NMK: Tensor, rows: int) -> Tensor:
    """The last `rows` rows, with zeros for those before the first."""
    missing = rows - x_NMK.shape[1]
    return F.pad(x_NMK, (0, 0, missing, 0)) if missing > 0 else x_NMK[:, -missing:]


def _by_distance(table_NTS: Tensor, window: int) -> Tensor:
    """[T, S], a column per key -> [T, W], a column per distance, oldest first: pad, then read longer rows."""
    block, keys = table_NTS.shape[-2:]
    flat = F.pad(table_NTS.flatten(-2), (0, block))
    return flat.unflatten(-1, (block, keys + 1))[..., :window]


def _by_key(table_NTW: Tensor, keys: int) -> Tensor:
    """The inverse of `_by_distance`, with zeros where a query does not attend."""
    block, window = table_NTW.shape[-2:]
    flat = F.pad(table_NTW, (0, keys + 1 - window)).flatten(-2)[..., : block * keys]
    return flat.unflatten(-1, (block, keys))


def _unfilled(filled_B: Tensor, heads: int, block: int, window: int) -> Tensor:
    """[N, T, W]: which distances lie before the start of the text; the nearest distance is 0."""
    queries_T = torch.arange(block, device=filled_B.device)
    distances_W = torch.arange(window - 1, -1, -1, device=filled_B.device)
    unfilled_BTW = distances_W > (queries_T + filled_B[:, None])[..., None]
    return unfilled_BTW.repeat_interleave(heads, dim=0)
