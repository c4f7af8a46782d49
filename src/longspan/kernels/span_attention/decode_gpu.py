"""Span attention for one token after another on a GPU, in steps that can be captured as a CUDA graph.

A graph repeats the same operations at the same addresses. So keys and values are in ring buffers, where the
newest overwrite the oldest, and counters on the device hold the write position. A ring has one row more than
the window: the row that a step writes is not read in that step.

The keys of a head are split into parts of equal length, one for each program, and the persistent vectors
into further parts. A program stores the largest score of its part, and with e = exp(score - largest) and the
soft mask m

    Z = sum of e,    Y = sum of e m,    A = sum of e m v

from which the parts of a head are combined, as `triton_kernels.py` does with tiles.

Shapes: as in the package; R rows of all rings, C parts, N distances or persistent vectors of a tile.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.span_attention.context import EPSILON, AttentionContext

PART = 64

EPS = tl.constexpr(EPSILON)


class OneToken:
    """The past of all heads, and `attend`, which reads the next token of every text and remembers it.

    In the context every head is a group of its own. The weights are fixed.
    """

    def __init__(self, context: AttentionContext) -> None:
        past, windows = context.past, context.windows
        filled_B, persistent = context.filled_B, context.persistent
        position_keys = context.mapped_position_keys()
        first = past[0]
        sizes = [window + 1 for window in windows]
        begins = list(accumulate(sizes, initial=0))
        self._rings_RB2K = first.new_zeros(begins[-1], first.shape[0], 2, first.shape[-1])
        for kv_BM2K, end, window in zip(past, begins[1:], windows, strict=True):
            near_BM2K = kv_BM2K[:, max(0, kv_BM2K.shape[1] - window) :]
            self._rings_RB2K[end - near_BM2K.shape[1] : end] = near_BM2K.transpose(0, 1)
        self._heads_H2 = torch.tensor([*zip(begins, windows, strict=False)], device=first.device)
        self._spans = None if context.spans is None else context.spans.float().contiguous()
        self._ramp = float(context.ramp)
        self._position_keys = None if position_keys is None else position_keys.contiguous()
        self._biases = context.content_bias_HK, context.position_bias_HK
        self._persistent = (
            (None, None) if persistent is None else (persistent[0].contiguous(), persistent[1].contiguous())
        )
        self._renormalise = context.renormalise and context.spans is not None
        self._first_distance = context.first_distance
        # Tokens read since the rings were made, and filled rows.
        self._counts_2B = torch.zeros(2, first.shape[0], dtype=torch.long, device=first.device)
        self._has_filled = filled_B is not None
        if filled_B is not None:
            self._counts_2B[1] = filled_B
        self._text_parts = triton.cdiv(max(windows), PART)
        num_persistent = 0 if persistent is None else persistent[0].shape[1]
        self._parts = self._text_parts + triton.cdiv(num_persistent, PART)

    def attend(self, q_BHK: Tensor, kv_BXK: Tensor, spans_BH: Tensor | None = None) -> Tensor:
        """[B, H, K]; a text has the keys of all heads and then their values. Its rows are contiguous.

        `spans_BH` are the spans of the token, if those in the context are of every query.
        """
        batch, heads, width = q_BHK.shape
        k_BHK, v_BHK = kv_BXK.split(heads, dim=1)
        out_BHK = q_BHK.new_empty(batch, heads, width)
        sums_3BHC = q_BHK.new_empty(3, batch, heads, self._parts, dtype=torch.float32)
        found_BHCK = q_BHK.new_empty(batch, heads, self._parts, width, dtype=torch.float32)
        spans = self._spans if spans_BH is None else spans_BH.float().contiguous()
        keys, (persistent_k_HPK, persistent_v_HPK) = self._position_keys, self._persistent
        constants = {"WIDTH": width, "BK": triton.next_power_of_2(width)}
        _part_kernel[(self._parts, batch * heads)](
            q_BHK, k_BHK, v_BHK, self._rings_RB2K, self._heads_H2, self._counts_2B, spans, keys,
            *self._biases, persistent_k_HPK, persistent_v_HPK, sums_3BHC, found_BHCK,
            q_BHK.stride(0), k_BHK.stride(0), v_BHK.stride(0), batch, heads, self._parts, self._text_parts,
            0 if persistent_k_HPK is None else persistent_k_HPK.shape[1],
            heads if spans is not None and spans.dim() > 1 else 0, self._ramp,
            keys.stride(0) if keys is not None and keys.dim() == 3 else 0, 1 / math.sqrt(width),
            HAS_SPANS=spans is not None, HAS_POSITIONS=keys is not None,
            HAS_CONTENT_BIAS=self._biases[0] is not None, HAS_POSITION_BIAS=self._biases[1] is not None,
            HAS_PERSISTENT=persistent_k_HPK is not None, HAS_FILLED=self._has_filled,
            FIRST=self._first_distance, BN=PART, **constants,
        )  # fmt: skip
        _join_kernel[(batch * heads,)](
            out_BHK, sums_3BHC, found_BHCK, self._counts_2B, batch, heads, self._parts,
            MOST=triton.next_power_of_2(self._parts), RENORMALISE=self._renormalise, **constants,
        )  # fmt: skip
        return out_BHK

    def put(self, row: int, source: OneToken, source_row: int) -> None:
        self._rings_RB2K[:, row] = source._rings_RB2K[:, source_row]
        self._counts_2B[:, row] = source._counts_2B[:, source_row]


@triton.jit
def _part_kernel(
    Q, K, V, RINGS, HEADS, COUNTS, SPANS, POSITION_KEYS, CONTENT_BIAS, POSITION_BIAS, PERSISTENT_K,
    PERSISTENT_V, SUMS, FOUND,
    step_q, step_k, step_v, batch, heads, parts, text_parts, num_persistent, step_spans, ramp, keys_of_head,
    scale,
    WIDTH: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr,
    HAS_SPANS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_CONTENT_BIAS: tl.constexpr,
    HAS_POSITION_BIAS: tl.constexpr, HAS_PERSISTENT: tl.constexpr, HAS_FILLED: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    text, head = row // heads, row % heads
    k_K = tl.arange(0, BK)
    inside_K = k_K < WIDTH
    own = head * WIDTH + k_K
    q_K = tl.load(Q + text * step_q + own, mask=inside_K, other=0.0).to(tl.float32)
    content_K, position_K = q_K, q_K
    if HAS_CONTENT_BIAS:
        content_K += tl.load(CONTENT_BIAS + head * WIDTH + k_K, mask=inside_K, other=0.0).to(tl.float32)
    if HAS_POSITION_BIAS:
        position_K += tl.load(POSITION_BIAS + head * WIDTH + k_K, mask=inside_K, other=0.0).to(tl.float32)
    score_N = tl.full([BN], float("-inf"), tl.float32)
    mask_N = tl.zeros([BN], tl.float32)
    v_NK = tl.zeros([BN, BK], tl.float32)
    begin, window = tl.load(HEADS + 2 * head), tl.load(HEADS + 2 * head + 1).to(tl.int32)
    if part * BN < window:  # a program beyond its head's window has nothing to read
        step = tl.load(COUNTS + text)
        row_size = batch * 2 * WIDTH
        ring = RINGS + (begin * batch + text) * 2 * WIDTH
        new_k_K = tl.load(K + text * step_k + own, mask=inside_K, other=0.0)
        new_v_K = tl.load(V + text * step_v + own, mask=inside_K, other=0.0)
        if part == 0:
            newest = ring + step % (window + 1) * row_size + k_K
            tl.store(newest, new_k_K, mask=inside_K)
            tl.store(newest + WIDTH, new_v_K, mask=inside_K)
        i_N = part * BN + tl.arange(0, BN)
        distance_N = i_N + FIRST
        seen_N = i_N < window
        if HAS_FILLED:
            seen_N &= distance_N <= tl.load(COUNTS + batch + text)
        remembered_N = seen_N & (distance_N > 0)
        at_N = (step + window + 1 - distance_N) % (window + 1) * row_size
        here_NK = remembered_N[:, None] & inside_K[None, :]
        kv = ring + at_N[:, None] + k_K[None, :]
        k_NK = tl.load(kv, mask=here_NK, other=0.0).to(tl.float32)
        v_NK = tl.load(kv + WIDTH, mask=here_NK, other=0.0).to(tl.float32)
        if FIRST == 0:
            k_NK = tl.where(distance_N[:, None] == 0, new_k_K[None, :].to(tl.float32), k_NK)
            v_NK = tl.where(distance_N[:, None] == 0, new_v_K[None, :].to(tl.float32), v_NK)
        score_N = tl.sum(k_NK * content_K[None, :], 1)
        if HAS_POSITIONS:
            keys = POSITION_KEYS + head * keys_of_head + i_N[:, None] * WIDTH + k_K[None, :]
            p_NK = tl.load(keys, mask=seen_N[:, None] & inside_K[None, :], other=0.0).to(tl.float32)
            score_N += tl.sum(p_NK * position_K[None, :], 1)
        score_N = tl.where(seen_N, score_N * scale, float("-inf"))
        mask_N = seen_N.to(tl.float32)
        if HAS_SPANS:
            beyond_N = tl.load(SPANS + text * step_spans + head) - i_N.to(tl.float32)
            soft_N = tl.math.div_rn(beyond_N, tl.full([BN], 0.0, tl.float32) + ramp) + 1.0
            mask_N = tl.where(seen_N, tl.minimum(tl.maximum(soft_N, 0.0), 1.0), 0.0)
    elif HAS_PERSISTENT and part >= text_parts:
        i_N = (part - text_parts) * BN + tl.arange(0, BN)
        seen_N = i_N < num_persistent
        at_NK = (head * num_persistent + i_N[:, None]) * WIDTH + k_K[None, :]
        here_NK = seen_N[:, None] & inside_K[None, :]
        k_NK = tl.load(PERSISTENT_K + at_NK, mask=here_NK, other=0.0).to(tl.float32)
        v_NK = tl.load(PERSISTENT_V + at_NK, mask=here_NK, other=0.0).to(tl.float32)
        score_N = tl.where(seen_N, tl.sum(k_NK * content_K[None, :], 1) * scale, float("-inf"))
        mask_N = seen_N.to(tl.float32)
    top = tl.max(score_N, 0)
    e_N = tl.exp(score_N - tl.where(top == float("-inf"), 0.0, top))  # a part may see nothing
    weight_N = e_N * mask_N
    size = batch * heads * parts
    place = row * parts + part
    tl.store(SUMS + place, top)
    tl.store(SUMS + size + place, tl.sum(e_N, 0))
    tl.store(SUMS + 2 * size + place, tl.sum(weight_N, 0))
    tl.store(FOUND + place * WIDTH + k_K, tl.sum(weight_N[:, None] * v_NK, 0), mask=inside_K)


@triton.jit
def _join_kernel(
    OUT, SUMS, FOUND, COUNTS, batch, heads, parts,
    MOST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row % heads == 0:  # one program per text counts the token
        count = COUNTS + row // heads
        tl.store(count, tl.load(count) + 1)
        tl.store(count + batch, tl.load(count + batch) + 1)
    k_K, part_C = tl.arange(0, BK), tl.arange(0, MOST)
    inside_K, there_C = k_K < WIDTH, part_C < parts
    size = batch * heads * parts
    place_C = row * parts + part_C
    top_C = tl.load(SUMS + place_C, mask=there_C, other=float("-inf"))
    share_C = tl.exp(top_C - tl.max(top_C, 0))
    z = tl.sum(share_C * tl.load(SUMS + size + place_C, mask=there_C, other=0.0), 0)
    y = tl.sum(share_C * tl.load(SUMS + 2 * size + place_C, mask=there_C, other=0.0), 0)
    here_CK = there_C[:, None] & inside_K[None, :]
    found_CK = tl.load(FOUND + place_C[:, None] * WIDTH + k_K[None, :], mask=here_CK, other=0.0)
    total = y + EPS * z if RENORMALISE else z
    out_K = tl.sum(share_C[:, None] * found_CK, 0) / total
    tl.store(OUT + row * WIDTH + k_K, out_K.to(OUT.dtype.element_ty), mask=inside_K)
