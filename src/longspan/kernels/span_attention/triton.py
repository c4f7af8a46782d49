"""Span attention as Triton kernels: a tile of queries at a time, and only the keys that its head can see.

Nothing of the size of the score table is kept. The forward pass goes over the keys once, with the running
maximum, Z = sum of e and Y = sum of e m, where e = exp(score - maximum) and m is the soft mask:

    out = sum e m v / (Y + 1e-8 Z)

and leaves one number per query, the logarithm of that total. The backward pass makes the weights anew from
it, once a tile of queries at a time for the gradients of queries and spans, and once a tile of keys at a time
for those of keys and values. Every program writes what no other writes: results do not depend on the order in
which programs run.

Keys have two sources. `PAST` holds what each group of heads remembers, as long as that group needs it; the
block's own keys follow. Both are addressed by position, negative in the past, so a loop is a source and a
range. The term for the distance is a table R[t, c] that was made by matrix products, oldest distance first:
position j of query t is its column j - t + constant, so a row of it lines up with a row of keys.

Shapes: as in the package; BM queries and BN keys in a tile, BK the head's width rounded up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.span_attention.mask import EPSILON

EPS = tl.constexpr(EPSILON)
LOG2E = tl.constexpr(1.4426950408889634)
SLOTS = tl.constexpr(1 << 30)  # the position that slots begin at, for dropout

# Columns of the table of heads.
WINDOW, REACH, PAST_KEYS, PAST_VALUES, PAST_BATCH, PAST_ROW, TABLE, TABLE_ROW = range(8)


@triton.jit
def _mixed(x):
    """A hash of 32 bits in which every bit of x moves every other."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _kept(row_key, column_key, threshold):
    """Which weights dropout keeps: a function of seed and query, mixed, and of the key's place, mixed.

    Slots have positions far beyond all text.
    """
    x = (row_key ^ column_key) * 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B >= threshold


@triton.jit
def _rise(edge, distance, slope):
    """The soft mask before it is clamped; `edge` is where it reaches 0. In [0, 1] it moves with the span."""
    return (edge - distance) * slope


@triton.jit
def _clamped(rise):
    return tl.minimum(tl.maximum(rise, 0.0), 1.0)


@triton.jit
def _visible(t, j, window, filled, FIRST: tl.constexpr, HAS_FILLED: tl.constexpr):
    distance = t - j
    seen = (distance >= FIRST) & (distance < FIRST + window)
    if HAS_FILLED:
        seen = seen & (j >= -filled)
    return seen


@triton.jit
def _first_tile(position, BN: tl.constexpr):
    """The start of the tile that holds a position, which may be negative; tiles meet at position 0."""
    return tl.where(position < 0, -((-position + BN - 1) // BN) * BN, (position // BN) * BN)


@triton.jit
def forward_kernel(
    Q, K, V, PAST, R, SLOT_K, SLOT_V, OUT, LSE, HEADS, SPANS, FILLED, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    B, H, T, P, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B  # heads are sorted by window: the longest begin first
    t0 = tl.program_id(0) * BM
    table = HEADS + h * 8
    window = tl.load(table).to(tl.int32)
    reach = tl.load(table + 1).to(tl.int32)
    past_k = PAST + tl.load(table + 2) + b * tl.load(table + 4)
    past_v = PAST + tl.load(table + 3) + b * tl.load(table + 4)
    past_row = tl.load(table + 5)
    r_row = tl.load(table + 7)
    r_base = tl.load(table + 6) + (b * T).to(tl.int64) * r_row + r_row - 1 + FIRST
    edge = tl.load(SPANS + h) + (FIRST + ramp) if HAS_SPANS else 0.0
    filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else 0
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)

    t = t0 + tl.arange(0, BM)
    kk = tl.arange(0, BK)
    in_head = kk < WIDTH
    q_at = Q + b.to(tl.int64) * q_b + h * q_h + t[:, None] * q_t + kk[None, :]
    q = tl.load(q_at, mask=(t < T)[:, None] & in_head[None, :], other=0.0)
    row = (b * H + h) * T + t
    row_key = _mixed(row.to(tl.uint32) ^ seed)

    top = tl.full([BM], float("-inf"), tl.float32)
    z = tl.zeros([BM], tl.float32)
    y = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BK], tl.float32)

    oldest = t0 - FIRST - window + 1
    if HAS_FILLED:
        oldest = tl.maximum(oldest, -filled)
    end = tl.minimum(t0 + BM - FIRST, T)
    for from_block in tl.static_range(2):
        if from_block:
            k_base = K + b.to(tl.int64) * k_b + h * k_h
            v_base = V + b.to(tl.int64) * v_b + h * v_h
            k_row, v_row = k_t, v_t
            start, stop = _first_tile(tl.maximum(oldest, 0), BN), end
        else:
            k_base, v_base = past_k + reach * past_row, past_v + reach * past_row
            k_row, v_row = past_row, past_row
            start, stop = _first_tile(tl.minimum(oldest, 0), BN), tl.minimum(end, 0)
        for n0 in range(start, stop, BN):
            j = n0 + tl.arange(0, BN)
            there = (j >= -reach) & (j < T)
            k = tl.load(
                k_base + j[None, :] * k_row + kk[:, None], mask=there[None, :] & in_head[:, None], other=0.0
            )
            s = tl.dot(q, k, input_precision=PRECISION)
            seen = _visible(t[:, None], j[None, :], window, filled, FIRST, HAS_FILLED)
            if HAS_POSITIONS:
                r_at = r_base + t[:, None].to(tl.int64) * r_row + (j[None, :] - t[:, None])
                s += tl.load(R + r_at, mask=seen & (t < T)[:, None], other=0.0).to(tl.float32)
            s = tl.where(seen, s * (scale * LOG2E), float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            e = tl.exp2(s - base[:, None])
            z = z * shrink + tl.sum(e, 1)
            if HAS_SPANS:
                e *= _clamped(_rise(edge, t[:, None] - j[None, :], slope))
                y = y * shrink + tl.sum(e, 1)
            if HAS_DROPOUT:
                e = tl.where(_kept(row_key[:, None], _mixed(j.to(tl.uint32))[None, :], threshold), e, 0.0)
            v = tl.load(
                v_base + j[:, None] * v_row + kk[None, :], mask=there[:, None] & in_head[None, :], other=0.0
            )
            acc = acc * shrink[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
            top = new_top

    if HAS_SLOTS:
        for p0 in range(0, P, BN):
            p = p0 + tl.arange(0, BN)
            slot = h * P + p
            k = tl.load(
                SLOT_K + slot[None, :] * WIDTH + kk[:, None],
                mask=(p < P)[None, :] & in_head[:, None],
                other=0.0,
            )
            s = tl.dot(q, k, input_precision=PRECISION)
            s = tl.where((p < P)[None, :], s * (scale * LOG2E), float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            shrink = tl.exp2(top - new_top)
            e = tl.exp2(s - new_top[:, None])
            z = z * shrink + tl.sum(e, 1)
            y = y * shrink + tl.sum(e, 1)
            if HAS_DROPOUT:
                e = tl.where(
                    _kept(row_key[:, None], _mixed((p + SLOTS).to(tl.uint32))[None, :], threshold), e, 0.0
                )
            v = tl.load(
                SLOT_V + slot[:, None] * WIDTH + kk[None, :],
                mask=(p < P)[:, None] & in_head[None, :],
                other=0.0,
            )
            acc = acc * shrink[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
            top = new_top

    total = z
    if HAS_SPANS and RENORMALISE:
        total = y + EPS * z
    if HAS_DROPOUT:
        acc *= keep_scale
    out = acc / total[:, None]
    out_at = OUT + b.to(tl.int64) * o_b + h * o_h + t[:, None] * o_t + kk[None, :]
    tl.store(out_at, out.to(OUT.dtype.element_ty), mask=(t < T)[:, None] & in_head[None, :])
    tl.store(LSE + row, top + tl.log2(total), mask=t < T)


@triton.jit
def _score_gradient(share, dw, inner, mask, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr):
    """The gradient of the scores: `share` is the softmax over the total, w = share mask, inner = <w, dw>."""
    if HAS_SPANS:
        if RENORMALISE:
            # What the softmax takes back cancels to 1e-8 <w, dw>: outside the span that is all there is.
            return share * (mask * (dw - inner) - EPS * inner)
        else:
            return share * (mask * dw - inner)
    else:
        return share * (dw - inner)


@triton.jit
def query_gradient_kernel(
    Q, K, V, PAST, R, SLOT_K, SLOT_V, OUT, DOUT, LSE, INNER, HEADS, SPANS, FILLED, SEED, DQ, DR, DSPAN,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    B, H, T, P, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries: their gradient, that of their rows of R, and their part of the span's.

    It also leaves <out, dout> of every query for the kernels that follow.
    """
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B
    t0 = tl.program_id(0) * BM
    table = HEADS + h * 8
    window = tl.load(table).to(tl.int32)
    reach = tl.load(table + 1).to(tl.int32)
    past_k = PAST + tl.load(table + 2) + b * tl.load(table + 4)
    past_v = PAST + tl.load(table + 3) + b * tl.load(table + 4)
    past_row = tl.load(table + 5)
    r_row = tl.load(table + 7)
    r_base = tl.load(table + 6) + (b * T).to(tl.int64) * r_row + r_row - 1 + FIRST
    edge = tl.load(SPANS + h) + (FIRST + ramp) if HAS_SPANS else 0.0
    filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else 0
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)

    t = t0 + tl.arange(0, BM)
    kk = tl.arange(0, BK)
    in_head = kk < WIDTH
    inside = (t < T)[:, None] & in_head[None, :]
    row = (b * H + h) * T + t
    row_key = _mixed(row.to(tl.uint32) ^ seed)
    q = tl.load(Q + b.to(tl.int64) * q_b + h * q_h + t[:, None] * q_t + kk[None, :], mask=inside, other=0.0)
    out = tl.load(
        OUT + b.to(tl.int64) * o_b + h * o_h + t[:, None] * o_t + kk[None, :], mask=inside, other=0.0
    )
    dout = tl.load(
        DOUT + b.to(tl.int64) * do_b + h * do_h + t[:, None] * do_t + kk[None, :], mask=inside, other=0.0
    )
    lse = tl.load(LSE + row, mask=t < T, other=0.0)
    inner = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(INNER + row, inner, mask=t < T)
    dq = tl.zeros([BM, BK], tl.float32)
    dspan = tl.zeros([BM], tl.float32)

    oldest = t0 - FIRST - window + 1
    if HAS_FILLED:
        oldest = tl.maximum(oldest, -filled)
    end = tl.minimum(t0 + BM - FIRST, T)
    for from_block in tl.static_range(2):
        if from_block:
            k_base = K + b.to(tl.int64) * k_b + h * k_h
            v_base = V + b.to(tl.int64) * v_b + h * v_h
            k_row, v_row = k_t, v_t
            start, stop = _first_tile(tl.maximum(oldest, 0), BN), end
        else:
            k_base, v_base = past_k + reach * past_row, past_v + reach * past_row
            k_row, v_row = past_row, past_row
            start, stop = _first_tile(tl.minimum(oldest, 0), BN), tl.minimum(end, 0)
        for n0 in range(start, stop, BN):
            j = n0 + tl.arange(0, BN)
            distance = t[:, None] - j[None, :]
            there = (j >= -reach) & (j < T)
            k = tl.load(
                k_base + j[:, None] * k_row + kk[None, :], mask=there[:, None] & in_head[None, :], other=0.0
            )
            v = tl.load(
                v_base + j[None, :] * v_row + kk[:, None], mask=there[None, :] & in_head[:, None], other=0.0
            )
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            seen = _visible(t[:, None], j[None, :], window, filled, FIRST, HAS_FILLED) & (t < T)[:, None]
            r_at = r_base + t[:, None].to(tl.int64) * r_row + (j[None, :] - t[:, None])
            if HAS_POSITIONS:
                s += tl.load(R + r_at, mask=seen, other=0.0).to(tl.float32)
            share = tl.where(seen, tl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
            dw = tl.dot(dout, v, input_precision=PRECISION)
            if HAS_DROPOUT:
                dw = tl.where(
                    _kept(row_key[:, None], _mixed(j.to(tl.uint32))[None, :], threshold), dw * keep_scale, 0.0
                )
            mask = 1.0
            if HAS_SPANS:
                rise = _rise(edge, distance, slope)
                mask = _clamped(rise)
                dmask = share * (dw - inner[:, None]) if RENORMALISE else share * dw
                dspan += tl.sum(tl.where((rise >= 0.0) & (rise <= 1.0), dmask, 0.0), 1)
            ds = _score_gradient(share, dw, inner[:, None], mask, HAS_SPANS, RENORMALISE)
            if HAS_POSITIONS:
                tl.store(DR + r_at, ds.to(DR.dtype.element_ty), mask=seen)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)

    if HAS_SLOTS:
        for p0 in range(0, P, BN):
            p = p0 + tl.arange(0, BN)
            slot = h * P + p
            k = tl.load(
                SLOT_K + slot[:, None] * WIDTH + kk[None, :],
                mask=(p < P)[:, None] & in_head[None, :],
                other=0.0,
            )
            v = tl.load(
                SLOT_V + slot[None, :] * WIDTH + kk[:, None],
                mask=(p < P)[None, :] & in_head[:, None],
                other=0.0,
            )
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            share = tl.where((p < P)[None, :], tl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
            dw = tl.dot(dout, v, input_precision=PRECISION)
            if HAS_DROPOUT:
                dw = tl.where(
                    _kept(row_key[:, None], _mixed((p + SLOTS).to(tl.uint32))[None, :], threshold),
                    dw * keep_scale,
                    0.0,
                )
            ds = _score_gradient(share, dw, inner[:, None], 1.0, HAS_SPANS, RENORMALISE)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)

    dq_at = DQ + b.to(tl.int64) * dq_b + h * dq_h + t[:, None] * dq_t + kk[None, :]
    tl.store(dq_at, (dq * scale).to(DQ.dtype.element_ty), mask=inside)
    if HAS_SPANS:
        dspan = tl.where(t < T, dspan, 0.0)
        tl.store(DSPAN + (h * B + b) * tl.num_programs(0) + tl.program_id(0), tl.sum(dspan, 0) * slope)


@triton.jit
def key_gradient_kernel(
    Q, K, V, PAST, R, DOUT, LSE, INNER, HEADS, SPANS, FILLED, SEED, DK, DV, DPAST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    B, H, T, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys, of the block or of the past: the gradients of keys and values."""
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B
    table = HEADS + h * 8
    window = tl.load(table).to(tl.int32)
    reach = tl.load(table + 1).to(tl.int32)
    # The block's tiles come first, then those of the past, backwards: as many as the head has.
    tiles = tl.cdiv(T, BN)
    number = tl.program_id(0)
    n0 = tl.where(number < tiles, number * BN, (tiles - 1 - number) * BN)
    if n0 + BN > -reach:
        past_row = tl.load(table + 5)
        from_past = n0 < 0
        k_base = K + b.to(tl.int64) * k_b + h * k_h
        v_base = V + b.to(tl.int64) * v_b + h * v_h
        dk_base = DK + b.to(tl.int64) * dk_b + h * dk_h
        dv_base = DV + b.to(tl.int64) * dv_b + h * dv_h
        k_row, v_row, dk_row, dv_row = (
            k_t.to(tl.int64),
            v_t.to(tl.int64),
            dk_t.to(tl.int64),
            dv_t.to(tl.int64),
        )
        if from_past:
            past = b * tl.load(table + 4) + reach * past_row
            k_base, v_base = PAST + tl.load(table + 2) + past, PAST + tl.load(table + 3) + past
            dk_base, dv_base = DPAST + tl.load(table + 2) + past, DPAST + tl.load(table + 3) + past
            k_row, v_row, dk_row, dv_row = past_row, past_row, past_row, past_row
        r_row = tl.load(table + 7)
        r_base = tl.load(table + 6) + (b * T).to(tl.int64) * r_row + r_row - 1 + FIRST
        edge = tl.load(SPANS + h) + (FIRST + ramp) if HAS_SPANS else 0.0
        filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else 0
        seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)

        j = n0 + tl.arange(0, BN)
        kk = tl.arange(0, BK)
        in_head = kk < WIDTH
        there = ((j >= -reach) & (j < T))[:, None] & in_head[None, :]
        k = tl.load(k_base + j[:, None] * k_row + kk[None, :], mask=there, other=0.0)
        v = tl.load(v_base + j[:, None] * v_row + kk[None, :], mask=there, other=0.0)
        dk = tl.zeros([BN, BK], tl.float32)
        dv = tl.zeros([BN, BK], tl.float32)

        start = (tl.maximum(n0 + FIRST, 0) // BM) * BM
        stop = tl.minimum(n0 + BN - 1 + FIRST + window, T)
        for t0 in range(start, stop, BM):
            t = t0 + tl.arange(0, BM)
            row = (b * H + h) * T + t
            row_key = _mixed(row.to(tl.uint32) ^ seed)
            inside = (t < T)[:, None] & in_head[None, :]
            q = tl.load(
                Q + b.to(tl.int64) * q_b + h * q_h + t[:, None] * q_t + kk[None, :], mask=inside, other=0.0
            )
            dout = tl.load(
                DOUT + b.to(tl.int64) * o_b + h * o_h + t[:, None] * o_t + kk[None, :], mask=inside, other=0.0
            )
            lse = tl.load(LSE + row, mask=t < T, other=0.0)
            inner = tl.load(INNER + row, mask=t < T, other=0.0)
            distance = t[:, None] - j[None, :]
            seen = _visible(t[:, None], j[None, :], window, filled, FIRST, HAS_FILLED) & (t < T)[:, None]
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if HAS_POSITIONS:
                r_at = r_base + t[:, None].to(tl.int64) * r_row + (j[None, :] - t[:, None])
                s += tl.load(R + r_at, mask=seen, other=0.0).to(tl.float32)
            share = tl.where(seen, tl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
            dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            mask = _clamped(_rise(edge, distance, slope)) if HAS_SPANS else 1.0
            w = share * mask
            if HAS_DROPOUT:
                kept = _kept(row_key[:, None], _mixed(j.to(tl.uint32))[None, :], threshold)
                dw = tl.where(kept, dw * keep_scale, 0.0)
                w = tl.where(kept, w * keep_scale, 0.0)
            ds = _score_gradient(share, dw, inner[:, None], mask, HAS_SPANS, RENORMALISE)
            dv += tl.dot(tl.trans(w.to(dout.dtype)), dout, input_precision=PRECISION)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)

        tl.store(
            dk_base + j[:, None] * dk_row + kk[None, :], (dk * scale).to(DK.dtype.element_ty), mask=there
        )
        tl.store(dv_base + j[:, None] * dv_row + kk[None, :], dv.to(DV.dtype.element_ty), mask=there)


@triton.jit
def slot_gradient_kernel(
    Q, SLOT_K, SLOT_V, DOUT, LSE, INNER, SEED, DSLOT_K, DSLOT_V,
    q_b, q_h, q_t, o_b, o_h, o_t,
    B, H, T, P, share, scale, threshold, keep_scale,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of slots of one head over `share` rows of the batch: their part of the gradients."""
    part = tl.program_id(2)
    h = tl.program_id(1)
    p = tl.program_id(0) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    in_head = kk < WIDTH
    slot = h * P + p
    there = (p < P)[:, None] & in_head[None, :]
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)
    k = tl.load(SLOT_K + slot[:, None] * WIDTH + kk[None, :], mask=there, other=0.0)
    v = tl.load(SLOT_V + slot[:, None] * WIDTH + kk[None, :], mask=there, other=0.0)
    dk = tl.zeros([BN, BK], tl.float32)
    dv = tl.zeros([BN, BK], tl.float32)
    for b in range(part * share, tl.minimum((part + 1) * share, B)):
        q_base = Q + tl.cast(b, tl.int64) * q_b + h * q_h
        o_base = DOUT + tl.cast(b, tl.int64) * o_b + h * o_h
        for t0 in range(0, T, BM):
            t = t0 + tl.arange(0, BM)
            row = (b * H + h) * T + t
            row_key = _mixed(row.to(tl.uint32) ^ seed)
            inside = (t < T)[:, None] & in_head[None, :]
            q = tl.load(q_base + t[:, None] * q_t + kk[None, :], mask=inside, other=0.0)
            dout = tl.load(o_base + t[:, None] * o_t + kk[None, :], mask=inside, other=0.0)
            lse = tl.load(LSE + row, mask=t < T, other=0.0)
            inner = tl.load(INNER + row, mask=t < T, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            seen = (p < P)[None, :] & (t < T)[:, None]
            share = tl.where(seen, tl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
            dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            w = share
            if HAS_DROPOUT:
                kept = _kept(row_key[:, None], _mixed((p + SLOTS).to(tl.uint32))[None, :], threshold)
                dw = tl.where(kept, dw * keep_scale, 0.0)
                w = tl.where(kept, w * keep_scale, 0.0)
            ds = _score_gradient(share, dw, inner[:, None], 1.0, HAS_SPANS, RENORMALISE)
            dv += tl.dot(tl.trans(w.to(dout.dtype)), dout, input_precision=PRECISION)
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    at = (part * H * P + slot[:, None]) * WIDTH + kk[None, :]
    tl.store(DSLOT_K + at, dk * scale, mask=there)
    tl.store(DSLOT_V + at, dv, mask=there)
