"""Attention in which every head looks back over its own span.

For a query at position t and a distance d = first, first + 1, ..., first + window - 1:

    score(t, d) = ((q_t + u) . k_{t-d} + (q_t + v) . p_d) / sqrt(K)
    a = softmax over the distances of score
    w(d) = a(d) m(d) / (sum_d a(d) m(d) + 1e-8),    m(d) = clamp((span + first - d) / ramp + 1, 0, 1)
    out_t = sum_d dropout(w(d)) v_{t-d}

Persistent vectors are further keys and values of a head without a position: their score is
(q_t + u) . k_p / sqrt(K), they take part in the same softmax and their m is 1. A head has one span, or a
span for every query. Without spans there is no m and w = a. Without renormalisation w = a m: persistent
vectors do not gain what the mask removes. Positions before the first key count as zero keys and zero values;
with `filled`, the number of memory rows that are filled, query t of a block sees only the distances up to
t + filled.

The biases u and v of every head are optional, and every head may have its own p_d. Where p_d = M e_d, with a
matrix M of every head and e_d the same for all, M and e_d may be given instead: with few queries and many
distances (q_t + v) M is computed faster than all p_d.
With renormalisation, a window longer than every span plus ramp gives the same result as a longer one, except
for the effect of the 1e-8: so heads may be grouped, and each group has the window it needs. Without
renormalisation, a longer window reduces the weights inside the span.

| file | backend |
|---|---|
| `reference.py` | the specification, in loops |
| `eager.py` | plain torch, heads of a group together, on any device |
| `cpu.py`, `cpu.cpp` | compiled C++ for a CPU, every head over its own window |
| `gpu.py`, `triton_kernels.py`, `relative_bias.py` | Triton for a GPU, every head over its own window |
| `decode_cpu.py`, `decode_gpu.py` | decoding, one token after another, with their own KV cache |

`span_attention` is the entry point: it picks the backend. A block that is a whole text, seen by all heads
without spans, goes to torch's own attention. `one_token` is the entry point for decoding. `context.py` has
the arguments of all backends.

Shapes: B batch, T block, M memory, S = M + T keys, H heads, G heads of a group, X = 2G, K head width,
L longest distance, W window, P persistent vectors, E width of e_d.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.dispatch import forced_path, use_triton
from longspan.kernels.span_attention import cpu, decode_cpu, eager
from longspan.kernels.span_attention.context import AttentionContext, soft_mask

if TYPE_CHECKING:
    from longspan.kernels.span_attention import decode_gpu

SHORT = 128

__all__ = [
    "AttentionContext",
    "cuts_windows",
    "decoding_groups",
    "head_groups",
    "one_token",
    "soft_mask",
    "span_attention",
]


def head_groups(windows_H: Sequence[int], *, kinds_H: Sequence[int] | None = None) -> list[list[int]]:
    """Which heads to compute together: windows of a group differ at most by a factor of two.

    Windows up to `SHORT` are one group: smaller groups would cost more in small operations than they save.
    Heads of a group share the longest window among them, and the keys and values projected for it: their
    spans hide keys that are too far. Heads of different kinds are never in one group.
    """
    octaves_H = [max(window - 1, SHORT - 1).bit_length() for window in windows_H]
    alike_H = list(zip(octaves_H, kinds_H or [0] * len(windows_H), strict=True))
    heads = sorted(range(len(windows_H)), key=alike_H.__getitem__)
    return [list(group) for _, group in groupby(heads, key=alike_H.__getitem__)]


def cuts_windows(x: Tensor, head_width: int) -> bool:
    """Whether the backend for `x` cuts each head's window to its span, whatever window it is given."""
    return _gpu_backend(x, head_width) is not None


def span_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """[B, H, T, K]: every head over its own window of the past and the block.

    A backend may use the longest window of a group for all its heads.
    """
    if forced_path() is not None:
        return eager.span_attention(q_BHTK, k_BHTK, v_BHTK, context)
    if _is_causal_attention(q_BHTK, context):
        return F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, dropout_p=context.dropout, is_causal=True
        )
    if (gpu := _gpu_backend(q_BHTK, q_BHTK.shape[-1])) is not None:
        attended_BHTK: Tensor = gpu.span_attention(q_BHTK, k_BHTK, v_BHTK, context)
        return attended_BHTK
    if q_BHTK.shape[2] == 1 and context.dropout == 0 and not torch.is_grad_enabled():
        kv_BXK = torch.cat([k_BHTK[:, :, 0], v_BHTK[:, :, 0]], dim=1)
        return decode_cpu.OneToken(context, spare_rows=1).attend(q_BHTK[:, :, 0], kv_BXK)[:, :, None]
    if cpu.supports(q_BHTK, k_BHTK, v_BHTK, context):
        return cpu.span_attention(q_BHTK, k_BHTK, v_BHTK, context)
    return eager.span_attention(q_BHTK, k_BHTK, v_BHTK, context)


def decoding_groups(
    x: Tensor, head_width: int, windows_H: Sequence[int], *, kinds_H: Sequence[int] | None
) -> list[list[int]]:
    """The groups of heads in the context for `one_token`."""
    if cuts_windows(x, head_width):
        return [[head] for head in range(len(windows_H))]
    return decode_cpu.head_groups(windows_H, kinds_H)


def one_token(context: AttentionContext) -> decode_cpu.OneToken | decode_gpu.OneToken:
    """Attention for one token after another, starting from the past in the context."""
    if not cuts_windows(context.past[0], context.past[0].shape[-1]):
        return decode_cpu.OneToken(context)
    from longspan.kernels.span_attention import decode_gpu

    return decode_gpu.OneToken(context)


def _is_causal_attention(q_BHTK: Tensor, context: AttentionContext) -> bool:
    """Whether the block is a whole text with causal attention by content alone."""
    terms = (context.position_keys, context.content_bias_HK, context.persistent, context.spans)
    no_memory = context.filled_B is not None and not any(kv_BMXK.shape[1] for kv_BMXK in context.past)
    sees_all = context.first_distance == 0 and min(context.windows) >= q_BHTK.shape[2]
    return no_memory and sees_all and all(term is None for term in terms)


def _gpu_backend(x: Tensor, head_width: int) -> ModuleType | None:
    """The GPU kernels, if `x` is on a GPU and they support heads of this width."""
    if not use_triton(x):
        return None
    from longspan.kernels.span_attention import gpu

    return gpu if head_width <= gpu.LARGEST_HEAD else None
