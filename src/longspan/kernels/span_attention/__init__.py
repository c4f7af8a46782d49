"""Attention in which every head looks back over its own span.

For a query at position t and a distance d = first, first + 1, ..., first + window - 1:

    score(t, d) = ((q_t + u) . k_{t-d} + (q_t + v) . p_d) / sqrt(K)
    a = softmax over the distances of score
    w(d) = a(d) m(d) / (sum_d a(d) m(d) + 1e-8),    m(d) = clamp((span + first - d) / ramp + 1, 0, 1)
    out_t = sum_d dropout(w(d)) v_{t-d}

Persistent vectors are further keys and values per head that are no positions: their score is
(q_t + u) . k_p / sqrt(K), they take part in the same softmax and their m is 1. Without spans there is no m
and w = a. Not renormalised, w = a m: what the mask removes from a head does not go to persistent vectors.
Positions before the first key count as zero keys and zero values; with `filled`, the number of memory rows
that are filled, query t of a block sees the distances up to t + filled and no others.

The biases u and v of every head are optional, and every head may have its own p_d. Where p_d = M e_d, with a
matrix M of every head and e_d the same for all, they may be given apart: if queries are few and distances
many, (q_t + v) M is made sooner than all p_d.
Renormalised, a window that reaches beyond every span (plus ramp) gives the same result as a longer one,
except for the share that the 1e-8 gets: so heads may be grouped, and each group given the window it needs.
Not renormalised, a longer window leaves less for the span.

`reference.py` is the specification, in loops; `eager.py` is the path in plain torch, for heads that share a
window; `decode_cpu.py` is that for one query per text, in decoding; `cpu.py` runs all heads at once on a
processor, in compiled code; `gpu.py` does on a GPU, by the kernels of `triton_kernels.py`; `padded.py` is the
original's way, for comparison. A block that is a whole text, seen by all heads without spans, goes to torch's
own attention. `span_attention` is the entry point. `decode_gpu.py` reads on a GPU one token after another,
and keeps what it has read to itself.

Shapes: B batch, T block, M memory, S = M + T keys, H heads, G heads of a group, X = 2G, K head width,
L longest distance, W window, P persistent, E width of e_d.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.dispatch import forced_path, use_triton
from longspan.kernels.span_attention import cpu, decode_cpu, eager, padded
from longspan.kernels.span_attention.mask import soft_mask

if TYPE_CHECKING:
    from longspan.kernels.span_attention.decode_gpu import OneToken

SHORT = 128

__all__ = ["cuts_windows", "head_groups", "one_token", "soft_mask", "span_attention"]


def head_groups(windows_H: Sequence[int], *, kinds_H: Sequence[int] | None = None) -> list[list[int]]:
    """Which heads to compute together, so that no head pays for one that looks more than twice as far.

    Windows up to `SHORT` go together: cutting finer costs more in small operations than it saves. Heads of
    one group share the longest window among them, and the keys and values projected for it: their spans hide
    what is too far. Heads of different kinds never go together.
    """
    padded_all = forced_path() == "padded"
    octaves_H = [0 if padded_all else max(window - 1, SHORT - 1).bit_length() for window in windows_H]
    alike_H = list(zip(octaves_H, kinds_H or [0] * len(windows_H), strict=True))
    heads = sorted(range(len(windows_H)), key=alike_H.__getitem__)
    return [list(group) for _, group in groupby(heads, key=alike_H.__getitem__)]


def cuts_windows(x: Tensor, head_width: int) -> bool:
    """Whether heads on the device of `x` are cut to their spans there, whatever windows they are given."""
    return _gpu_backend(x, head_width) is not None


def one_token(**remembered: Any) -> OneToken:
    """Where heads are cut to their spans, what reads one token after another."""
    from longspan.kernels.span_attention.decode_gpu import OneToken

    return OneToken(**remembered)


def span_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    past: Sequence[Tensor],
    windows: Sequence[int],
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
    dropout: float = 0.0,
    windows_follow_spans: bool = False,
) -> Tensor:
    """[B, H, T, K]: every head over its own window of the past and the block.

    Heads come in groups, as `head_groups` forms them: `past` has for every group the keys of its heads and
    then their values, [B, M, X, K], oldest first. A head may be given the longest window of its group instead
    of its own or, with `windows_follow_spans`, a shorter one that its span still fits in. The rest is as
    `eager.span_attention` says, for all heads in their order.
    """
    nothing_before = filled_B is not None and not any(kv_BMXK.shape[1] for kv_BMXK in past)
    nothing_else = all(x is None for x in (position_keys, content_bias_HK, persistent, spans_H))
    all_of_it = first_distance == 0 and min(windows) >= q_BHTK.shape[2]
    if nothing_before and nothing_else and all_of_it and forced_path() is None:
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
    heads_together: dict[str, Any] = {
        "past": past,
        "windows": windows,
        "position_keys": position_keys,
        "content_bias_HK": content_bias_HK,
        "position_bias_HK": position_bias_HK,
        "position_map_HKE": position_map_HKE,
        "filled_B": filled_B,
        "persistent": persistent,
        "spans_H": spans_H,
        "ramp": ramp,
        "renormalise": renormalise,
        "first_distance": first_distance,
    }
    gpu = _gpu_backend(q_BHTK, q_BHTK.shape[-1])
    if gpu is not None:
        more = {"dropout": dropout, "windows_follow_spans": windows_follow_spans}
        return gpu.span_attention(q_BHTK, k_BHTK, v_BHTK, **more, **heads_together)
    if q_BHTK.shape[2] == 1 and dropout == 0 and forced_path() is None and not torch.is_grad_enabled():
        return decode_cpu.span_attention(q_BHTK, k_BHTK, v_BHTK, **heads_together)
    unknown = (content_bias_HK, position_bias_HK, position_map_HKE, persistent)
    compiled = (renormalise or spans_H is None) and all(x is None for x in unknown) and forced_path() is None
    if compiled and cpu.takes(q_BHTK, k_BHTK, v_BHTK, past, position_keys):
        return cpu.span_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            past=past,
            windows=windows,
            position_keys=position_keys,
            filled_B=filled_B,
            spans_H=spans_H,
            ramp=ramp,
            first_distance=first_distance,
            dropout=dropout,
        )
    return _group_by_group(q_BHTK, k_BHTK, v_BHTK, dropout=dropout, **heads_together)


def _group_by_group(
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
    persistent: tuple[Tensor, Tensor] | None,
    spans_H: Tensor | None,
    **shared: Any,
) -> Tensor:
    """In plain torch, with the longest window of every group."""
    path = padded if forced_path() == "padded" else eager
    shared_keys = position_keys is None or position_keys.dim() == 2
    out, start = [], 0
    sizes = [kv_BMXK.shape[2] // 2 for kv_BMXK in past]
    # Split at once: a slice for every group would make gradients of the whole from zeros, and add them up.
    of_groups = zip(past, *(x_BHTK.split(sizes, dim=1) for x_BHTK in (q_BHTK, k_BHTK, v_BHTK)), strict=True)
    for kv_BMXK, q_BGTK, k_BGTK, v_BGTK in of_groups:
        past_k_BGMK, past_v_BGMK = kv_BMXK.transpose(1, 2).chunk(2, dim=1)
        heads = slice(start, start + past_k_BGMK.shape[1])
        out.append(
            path.span_attention(
                q_BGTK,
                torch.cat([past_k_BGMK, k_BGTK], dim=2),
                torch.cat([past_v_BGMK, v_BGTK], dim=2),
                window=max(windows[heads]),
                position_keys=position_keys if shared_keys else _of(position_keys, heads),
                content_bias_HK=_of(content_bias_HK, heads),
                position_bias_HK=_of(position_bias_HK, heads),
                position_map_HKE=_of(position_map_HKE, heads),
                persistent=None if persistent is None else (persistent[0][heads], persistent[1][heads]),
                spans_H=_of(spans_H, heads),
                **shared,
            )
        )
        start = heads.stop
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _of(x_H: Tensor | None, heads: slice) -> Tensor | None:
    return None if x_H is None else x_H[heads]


def _gpu_backend(x: Tensor, head_width: int) -> ModuleType | None:
    """The kernels, for heads that they can take."""
    if not use_triton(x):
        return None
    from longspan.kernels.span_attention import gpu

    return gpu if head_width <= gpu.LARGEST_HEAD else None
