"""Span attention as Triton kernels: a tile of queries at a time, and only the keys that its head can see.

The forward pass keeps nothing of the size of the score table. It goes over the keys once, with the running
maximum, Z = sum of e and Y = sum of e m, where e = exp(score - maximum) and m is the soft mask:

    out = sum e m v / (Y + 1e-8 Z)

and stores one number per query, the logarithm of that total. The backward pass computes the weights again
from it: by tiles of queries for the gradients of queries and spans, by tiles of keys for those of keys and
values. No two programs write to the same place: results do not depend on the order in which programs run.

Most tiles are inside: all their queries see all their keys with a mask of 1. They are contiguous, between the
tiles at the far edge of the span and those at the query's own position, and need no masks.

Keys have two sources. `PAST` holds what each group of heads remembers, as long as that group needs it; the
block's own keys follow. Both are addressed by position, negative in the past, so a loop is a source and a
range. The term for the distance is a table R[t, c] that `relative_bias.py` has made, oldest distance first.
Position j of query t is its column j - t + t % 8 + constant: rows begin at multiples of 8, and so does every
eighth key in them: they are read and written in aligned vectors of 8 numbers. Tiles begin at such keys.
A tile may extend into the adjacent rows: the entries there belong to keys that are not seen.

Shapes: as in the package; BM queries and BN keys in a tile, BK the head's width rounded up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.kernels.hashing import kept_places, mixed
from longspan.kernels.span_attention.context import EPSILON

EPS = tl.constexpr(EPSILON)
LOG2E = tl.constexpr(1.4426950408889634)
BEYOND = tl.constexpr(1 << 30)  # a position at which no tile begins
PERSISTENT_BEGIN = tl.constexpr(1 << 30)  # for dropout: the position of the first persistent vector

# The table of heads has 8 numbers in a row. Those of the past count in rows of a head, WIDTH numbers each.
#   0 window   1 reach   2 keys in PAST   3 values in PAST   4 step of the batch   5 step of a position
#   6 begin of the table R   7 width of its rows: those of a text are as many as T rounded up to 8


@triton.jit
def _unclamped_mask(edge, t, j, slope):
    """The soft mask before it is clamped; `edge` is where it reaches 0. In [0, 1] it passes gradients."""
    return ((edge - t)[:, None] + j.to(tl.float32)[None, :]) * slope


@triton.jit
def _clamped(mask):
    return tl.minimum(tl.maximum(mask, 0.0), 1.0)


@triton.jit
def _rows(base, row, step, there, WIDTH: tl.constexpr, BK: tl.constexpr, ALL_THERE: tl.constexpr):
    """Rows of a head, [rows, BK], zeros for missing rows."""
    kk = tl.arange(0, BK)
    at = base + row[:, None] * step + kk[None, :]
    if ALL_THERE:
        if WIDTH == BK:
            return tl.load(at)
        else:
            return tl.load(at, mask=(kk < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH == BK:
            return tl.load(at, mask=there[:, None], other=0.0)
        else:
            return tl.load(at, mask=there[:, None] & (kk < WIDTH)[None, :], other=0.0)


@triton.jit
def _biased(q, BIAS, h, there, WIDTH: tl.constexpr, BK: tl.constexpr):
    """Rows of queries with the bias of their head; missing rows stay zeros."""
    kk = tl.arange(0, BK)
    bias = tl.load(BIAS + h * WIDTH + kk, mask=kk < WIDTH, other=0.0).to(q.dtype)
    both = (q.to(tl.float32) + bias.to(tl.float32)[None, :]).to(q.dtype)
    return tl.where(there[:, None], both, q)


@triton.jit
def _store_rows(base, row, step, there, values, WIDTH: tl.constexpr, BK: tl.constexpr):
    kk = tl.arange(0, BK)
    at = base + row[:, None] * step + kk[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=there[:, None] & (kk < WIDTH)[None, :])


@triton.jit
def _seen(t, j, window, filled, T, FIRST: tl.constexpr, HAS_FILLED: tl.constexpr):
    """Which keys the queries see, [queries, keys]."""
    # As unsigned numbers, distances below the first are larger than any window: one comparison is enough.
    beyond_first = ((t - FIRST)[:, None] - j[None, :]).to(tl.uint32)
    seen = beyond_first < tl.where(t < T, window, 0).to(tl.uint32)[:, None]
    if HAS_FILLED:
        seen = seen & (j >= -filled)[None, :]
    return seen


@triton.jit
def _table_begin(table, b, t0, T):
    """Where row `t0` of a text, a multiple of 8, has position 0 in R, and the stride of its rows."""
    step = tl.multiple_of(tl.load(table + 7), 8)
    begin = tl.multiple_of(tl.load(table + 6), 8)
    return begin + (b * (tl.cdiv(T, 8) * 8) + t0).to(tl.int64) * step + (step - 8 - t0), step.to(tl.int32)


@triton.jit
def _table_rows(step, BM: tl.constexpr):
    """Where the rows of a tile have the position that the first has at 0."""
    x = tl.arange(0, BM)
    return x * tl.multiple_of(step, 8) - x // 8 * 8


@triton.jit
def _in_rows(offset, step, BM: tl.constexpr, BN: tl.constexpr):
    """Which elements of a tile, whose keys begin `offset` after its queries, are in their row of a table."""
    step = tl.multiple_of(step, 8)
    begin = tl.multiple_of(offset, 8) + step - 8 - tl.arange(0, BM) // 8 * 8
    column = begin[:, None] + tl.arange(0, BN)[None, :]
    return (column >= 0) & (column < step)


@triton.jit
def _own_window(edge, FIRST: tl.constexpr):
    """How many distances reach just beyond the soft edge of a span, in steps of 16 as on the host."""
    return (tl.math.ceil(edge).to(tl.int32) - FIRST + 1 + 15) // 16 * 16


@triton.jit
def _head(
    HEADS, SPANS, h, row, there, ramp,
    FIRST: tl.constexpr, HAS_SPANS: tl.constexpr, FOLLOWS: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """A head's row in the table of heads, its window, its reach, and where its soft mask ends.

    With `DYNAMIC` window and end are vectors: those of the spans in these rows of SPANS.
    """
    table = HEADS + h * 8
    window = tl.load(table).to(tl.int32)
    reach = tl.load(table + 1).to(tl.int32)
    edge = 0.0
    if DYNAMIC:
        edge = tl.load(SPANS + row, mask=there, other=0.0) + (FIRST + ramp)
        window += tl.zeros_like(row)
    elif HAS_SPANS:
        edge = tl.load(SPANS + h) + (FIRST + ramp)
    if FOLLOWS:
        window = tl.minimum(window, _own_window(edge, FIRST))
    return table, window, reach, edge


@triton.jit
def _distances(
    edge, ramp, window, FIRST: tl.constexpr, HAS_SPANS: tl.constexpr, DYNAMIC: tl.constexpr
):  # fmt: skip
    """The longest window, and the largest distance at which all masks are above their corner."""
    inside = FIRST + window - 1
    if HAS_SPANS:
        inside = tl.minimum(tl.math.ceil(edge - ramp).to(tl.int32) - 1, inside)
    if DYNAMIC:
        return tl.max(window, 0), tl.min(inside, 0)
    else:
        return window, inside


@triton.jit
def _tiles_of(part: tl.constexpr, start, stop, first, last, STEP: tl.constexpr):
    """Begin and end of the tiles before [first, last), of those within it, and of those after.

    If there are none within it, all are before.
    """
    begin = start + tl.cdiv(tl.maximum(first - start, 0), STEP) * STEP
    end = start + (tl.maximum(last - start, 0) // STEP) * STEP
    inside, beyond = tl.where(begin < end, begin, BEYOND), tl.where(begin < end, end, BEYOND)
    if part == 0:
        return start, tl.minimum(inside, stop)
    elif part == 1:
        return inside, beyond
    else:
        return beyond, stop


@triton.jit
def _source(
    K, V, PAST, table, b, h, reach, k_b, k_h, k_t, v_b, v_h, v_t, oldest, end,
    FROM_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Addresses of keys and values of the block or the past, by position, and the range that tiles cover."""
    if FROM_BLOCK:
        k_base = K + b.to(tl.int64) * k_b + h * k_h
        v_base = V + b.to(tl.int64) * v_b + h * v_h
        return k_base, v_base, k_t, v_t, tl.maximum(oldest, 0) // 8 * 8, end
    else:
        row = tl.load(table + 5).to(tl.int32) * WIDTH
        past = PAST + b * tl.load(table + 4) * WIDTH + reach * row
        k_base = past + tl.load(table + 2) * WIDTH
        v_base = past + tl.load(table + 3) * WIDTH
        return k_base, v_base, row, row, tl.minimum(-tl.cdiv(-oldest, BN) * BN, 0), tl.minimum(end, 0)


@triton.jit
def _forward_tiles(
    start, stop, top, z, y, acc, q, t, row_key, k_base, v_base, k_row, v_row, r_base, r_row,
    window, reach, filled, edge, T, slope, scale, threshold,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, INSIDE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, HAS_FILLED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the running sums over the keys from `start` to `stop`. Without `edge` their mask is 1."""
    for n0 in range(start, stop, BN):
        n0 = tl.multiple_of(n0, 8)
        j = n0 + tl.arange(0, BN)
        there = (j >= -reach) & (j < T)
        k = _rows(k_base, j, k_row, there, WIDTH, BK, INSIDE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not INSIDE:
            seen = _seen(t, j, window, filled, T, FIRST, HAS_FILLED)
        if HAS_POSITIONS:
            r_at = (r_base + n0) + (r_row[:, None] + tl.arange(0, BN)[None, :])
            r = tl.load(r_at) if INSIDE else tl.load(r_at, mask=(t < T)[:, None], other=0.0)
            s += r.to(tl.float32)
        if not INSIDE:
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = new_top * (scale * LOG2E)
        if not INSIDE:
            base = tl.where(new_top == float("-inf"), 0.0, base)
        shrink = tl.exp2(top * (scale * LOG2E) - base)
        e = tl.exp2(s * (scale * LOG2E) - base[:, None])
        sum_e = tl.sum(e, 1)
        z = z * shrink + sum_e
        if HAS_SPANS:
            if not INSIDE and edge is not None:
                e *= _clamped(_unclamped_mask(edge, t, j, slope))
                sum_e = tl.sum(e, 1)
            y = y * shrink + sum_e
        if HAS_DROPOUT:
            e = tl.where(kept_places(row_key, j, threshold), e, 0.0)
        v = _rows(v_base, j, v_row, there, WIDTH, BK, INSIDE)
        acc = acc * shrink[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    return top, z, y, acc


@triton.jit
def forward_kernel(
    Q, K, V, PAST, R, PERSISTENT_K, PERSISTENT_V, BIAS, OUT, LSE, HEADS, SPANS, FILLED, SEED,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    B, H, T, P, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, FOLLOWS: tl.constexpr,
    DYNAMIC: tl.constexpr, HAS_PERSISTENT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILLED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WHOLE_PERSISTENT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B  # heads are sorted by window: the longest begin first
    t0 = tl.program_id(0) * BM
    t = t0 + tl.arange(0, BM)
    row = (b * H + h) * T + t
    table, window, reach, edge = _head(
        HEADS, SPANS, h, row, t < T, ramp, FIRST, HAS_SPANS, FOLLOWS, DYNAMIC
    )  # fmt: skip
    widest, far = _distances(edge, ramp, window, FIRST, HAS_SPANS, DYNAMIC)
    filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else reach
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)

    row_key = mixed(row.to(tl.uint32) ^ seed)
    q = _rows(Q + b.to(tl.int64) * q_b + h * q_h, t, q_t, t < T, WIDTH, BK, False)
    if HAS_BIAS:
        q = _biased(q, BIAS, h, t < T, WIDTH, BK)
    r_base, r_row = R, t
    if HAS_POSITIONS:
        begin, step = _table_begin(table, b, t0, T)
        r_base, r_row = R + begin, _table_rows(step, BM)

    top = tl.full([BM], float("-inf"), tl.float32)
    z = tl.zeros([BM], tl.float32)
    y = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BK], tl.float32)

    oldest = t0 - FIRST - widest + 1
    if HAS_FILLED:
        oldest = tl.maximum(oldest, -filled)
    end = tl.minimum(t0 + BM - FIRST, T)
    # Keys that lie inside: all queries of the tile see them.
    farthest = tl.maximum(t0 + BM - 1 - far, -tl.minimum(reach, filled))
    farthest = tl.where(t0 + BM <= T, farthest, end)
    for from_block in tl.static_range(2):
        k_base, v_base, k_row, v_row, start, stop = _source(
            K, V, PAST, table, b, h, reach, k_b, k_h, k_t, v_b, v_h, v_t, oldest, end, from_block, WIDTH, BN
        )  # fmt: skip
        for part in tl.static_range(3):
            n0, n1 = _tiles_of(part, start, stop, farthest, tl.minimum(t0 - FIRST + 1, stop), BN)
            if part < 2 or from_block:
                top, z, y, acc = _forward_tiles(
                    n0, n1, top, z, y, acc, q, t, row_key, k_base, v_base, k_row, v_row, r_base, r_row,
                    window, reach, filled, edge, T, slope, scale, threshold,
                    FIRST, WIDTH, BK, BN, part == 1,
                    HAS_POSITIONS, HAS_SPANS, HAS_FILLED, HAS_DROPOUT, PRECISION,
                )  # fmt: skip

    if HAS_PERSISTENT:
        # As keys that all queries see, of a text that ends at the last of them. Dropout hashes a row's key
        # xor a position: the bit of PERSISTENT_BEGIN may be set in either.
        own = h * P * WIDTH
        top, z, y, acc = _forward_tiles(
            0, P, top, z, y, acc, q, tl.zeros_like(t) + (P - 1), row_key ^ PERSISTENT_BEGIN,
            PERSISTENT_K + own, PERSISTENT_V + own, WIDTH, WIDTH, R, t, P, 0, 0, None, P,
            slope, scale, threshold, 0, WIDTH, BK, BN, WHOLE_PERSISTENT,
            False, HAS_SPANS, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip

    total = z
    if HAS_SPANS and RENORMALISE:
        total = y + EPS * z
    if HAS_DROPOUT:
        acc *= keep_scale
    out_base = OUT + b.to(tl.int64) * o_b + h * o_h
    _store_rows(out_base, t, o_t, t < T, acc / total[:, None], WIDTH, BK)
    tl.store(LSE + row, top * (scale * LOG2E) + tl.log2(total), mask=t < T)


@triton.jit
def _score_gradient(share, dw, inner, mask, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr):
    """The gradient of the scores: `share` is the softmax over the total, w = share mask, inner = <w, dw>."""
    if HAS_SPANS:
        if RENORMALISE:
            # The subtracted term of the softmax gradient, <da, a>, reduces to 1e-8 <w, dw>,
            # which is the only term outside the span.
            return share * (mask * (dw - inner) - EPS * inner)
        else:
            return share * (mask * dw - inner)
    else:
        return share * (dw - inner)


@triton.jit
def _query_gradient_tiles(
    start, stop, dq, dspan, q, dout, lse, inner, t0, t, row_key, k_base, v_base, k_row, v_row,
    r_base, dr_base, r_row, r_step, window, reach, filled, edge, T, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    INSIDE: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for n0 in range(start, stop, BN):
        n0 = tl.multiple_of(n0, 8)
        j = n0 + tl.arange(0, BN)
        there = (j >= -reach) & (j < T)
        k = _rows(k_base, j, k_row, there, WIDTH, BK, INSIDE)
        v = _rows(v_base, j, v_row, there, WIDTH, BK, INSIDE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if not INSIDE:
            seen = _seen(t, j, window, filled, T, FIRST, HAS_FILLED)
        if HAS_POSITIONS:
            r_at = (r_base + n0) + (r_row[:, None] + tl.arange(0, BN)[None, :])
            r = tl.load(r_at) if INSIDE else tl.load(r_at, mask=(t < T)[:, None], other=0.0)
            s += r.to(tl.float32)
        share = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        if not INSIDE:
            share = tl.where(seen, share, 0.0)
        dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if HAS_DROPOUT:
            dw = tl.where(kept_places(row_key, j, threshold), dw * keep_scale, 0.0)
        if HAS_SPANS and not INSIDE and edge is not None:
            unclamped = _unclamped_mask(edge, t, j, slope)
            dmask = share * (dw - inner[:, None]) if RENORMALISE else share * dw
            dspan += tl.sum(tl.where((unclamped >= 0.0) & (unclamped <= 1.0), dmask, 0.0), 1)
            ds = _score_gradient(share, dw, inner[:, None], _clamped(unclamped), HAS_SPANS, RENORMALISE)
        else:
            ds = _score_gradient(share, dw, inner[:, None], 1.0, HAS_SPANS, RENORMALISE)
        ds = ds.to(k.dtype)
        if HAS_POSITIONS:
            at = (dr_base + n0) + (r_row[:, None] + tl.arange(0, BN)[None, :])
            if INSIDE:
                tl.store(at, ds)
            else:
                here = _in_rows(n0 - t0, r_step, BM, BN) & (t < tl.cdiv(T, 8) * 8)[:, None]
                tl.store(at, ds, mask=here)
        dq += tl.dot(ds, k, input_precision=PRECISION)
    return dq, dspan


@triton.jit
def _clear_before(base, step, first, t0, T, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros for the distances in a row of the table that no tile covers: those before position `first`."""
    x = tl.arange(0, BM)
    before = tl.minimum(tl.maximum(first + step - 8 - t0 - x // 8 * 8, 0), step)
    before = tl.multiple_of(tl.where(t0 + x < tl.cdiv(T, 8) * 8, before, 0), 8)
    for c0 in range(0, tl.max(before, 0), BN):
        c = c0 + tl.arange(0, BN)
        at = base + (x * tl.multiple_of(step, 8))[:, None] + c[None, :]
        tl.store(at, 0.0, mask=c[None, :] < before[:, None])


@triton.jit
def query_gradient_kernel(
    Q, K, V, PAST, R, PERSISTENT_K, PERSISTENT_V, BIAS, OUT, DOUT, LSE, INNER, HEADS, SPANS, FILLED, SEED,
    DQ, DR, DSPAN, DBIAS, BIASED_Q,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    B, H, T, P, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, FOLLOWS: tl.constexpr,
    DYNAMIC: tl.constexpr, HAS_PERSISTENT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILLED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WHOLE_PERSISTENT: tl.constexpr,
):  # fmt: skip
    """A tile of queries: their gradient, that of their rows of R, and their part of those of span and bias.

    For the next kernels it also stores <out, dout> of every query, and queries with their bias in the layout
    of OUT.
    """
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B
    t0 = tl.program_id(0) * BM
    t = t0 + tl.arange(0, BM)
    row = (b * H + h) * T + t
    table, window, reach, edge = _head(
        HEADS, SPANS, h, row, t < T, ramp, FIRST, HAS_SPANS, FOLLOWS, DYNAMIC
    )  # fmt: skip
    widest, far = _distances(edge, ramp, window, FIRST, HAS_SPANS, DYNAMIC)
    filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else reach
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)

    row_key = mixed(row.to(tl.uint32) ^ seed)
    q = _rows(Q + b.to(tl.int64) * q_b + h * q_h, t, q_t, t < T, WIDTH, BK, False)
    if HAS_BIAS:
        q = _biased(q, BIAS, h, t < T, WIDTH, BK)
        _store_rows(BIASED_Q + b.to(tl.int64) * o_b + h * o_h, t, o_t, t < T, q, WIDTH, BK)
    out = _rows(OUT + b.to(tl.int64) * o_b + h * o_h, t, o_t, t < T, WIDTH, BK, False)
    dout = _rows(DOUT + b.to(tl.int64) * do_b + h * do_h, t, do_t, t < T, WIDTH, BK, False)
    lse = tl.load(LSE + row, mask=t < T, other=0.0)
    inner = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(INNER + row, inner, mask=t < T)
    oldest = t0 - FIRST - widest + 1
    if HAS_FILLED:
        oldest = tl.maximum(oldest, -filled)
    r_base, dr_base, r_row, step = R, DR, t, 8
    if HAS_POSITIONS:
        begin, step = _table_begin(table, b, t0, T)
        r_base, dr_base, r_row = R + begin, DR + begin, _table_rows(step, BM)
        first = tl.where(oldest < 0, -tl.cdiv(-oldest, BN) * BN, oldest // 8 * 8)
        _clear_before(dr_base - (step - 8 - t0), step, first, t0, T, BM, BN)
    dq = tl.zeros([BM, BK], tl.float32)
    dspan = tl.zeros([BM], tl.float32)

    end = tl.minimum(t0 + BM - FIRST, T)
    farthest = tl.maximum(t0 + BM - 1 - far, -tl.minimum(reach, filled))
    farthest = tl.where(t0 + BM <= T, farthest, end)
    for from_block in tl.static_range(2):
        k_base, v_base, k_row, v_row, start, stop = _source(
            K, V, PAST, table, b, h, reach, k_b, k_h, k_t, v_b, v_h, v_t, oldest, end, from_block, WIDTH, BN
        )  # fmt: skip
        for part in tl.static_range(3):
            n0, n1 = _tiles_of(part, start, stop, farthest, tl.minimum(t0 - FIRST + 1, stop), BN)
            if part < 2 or from_block:
                dq, dspan = _query_gradient_tiles(
                    n0, n1, dq, dspan, q, dout, lse, inner, t0, t, row_key, k_base, v_base, k_row, v_row,
                    r_base, dr_base, r_row, step, window, reach, filled, edge,
                    T, slope, scale, threshold, keep_scale, FIRST, WIDTH, BK, BM, BN, part == 1,
                    HAS_POSITIONS, HAS_SPANS, RENORMALISE, HAS_FILLED, HAS_DROPOUT, PRECISION,
                )  # fmt: skip

    if HAS_PERSISTENT:
        own = h * P * WIDTH
        dq, dspan = _query_gradient_tiles(
            0, P, dq, dspan, q, dout, lse, inner, t0, tl.zeros_like(t) + (P - 1), row_key ^ PERSISTENT_BEGIN,
            PERSISTENT_K + own, PERSISTENT_V + own, WIDTH, WIDTH, R, DR, t, 8, P, 0, 0, None, P,
            slope, scale, threshold, keep_scale, 0, WIDTH, BK, BM, BN, WHOLE_PERSISTENT,
            False, HAS_SPANS, RENORMALISE, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip

    dq = (dq * scale).to(DQ.dtype.element_ty)
    _store_rows(DQ + b.to(tl.int64) * dq_b + h * dq_h, t, dq_t, t < T, dq, WIDTH, BK)
    part = (h * B + b) * tl.num_programs(0) + tl.program_id(0)
    if HAS_BIAS:
        kk = tl.arange(0, BK)
        # Computed from the stored, rounded rows, so that it can be subtracted from a sum over them.
        dbias = tl.sum(tl.where((t < T)[:, None], dq.to(tl.float32), 0.0), 0)
        tl.store(DBIAS + part * WIDTH + kk, dbias, mask=kk < WIDTH)
    if HAS_SPANS:
        dspan = tl.where(t < T, dspan, 0.0)
        if DYNAMIC:
            tl.store(DSPAN + row, dspan * slope, mask=t < T)
        else:
            tl.store(DSPAN + part, tl.sum(dspan, 0) * slope)


@triton.jit
def _key_gradient_tiles(
    start, stop, dk, dv, k, v, j, q_base, dout_base, q_t, o_t, row0, LSE, INNER, seed,
    r_base, r_step, HEADS, SPANS, h, window, filled, edge, T, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, INSIDE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, FOLLOWS: tl.constexpr,
    DYNAMIC: tl.constexpr, HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the queries from `start` to `stop`: to keys that all see if `window` is None."""
    for t0 in range(start, stop, BM):
        t0 = tl.multiple_of(t0, 8)
        t = t0 + tl.arange(0, BM)
        own, end = window, edge
        if DYNAMIC:
            _, own, _, end = _head(
                HEADS, SPANS, h, row0 + t, t < T, ramp, FIRST, HAS_SPANS, FOLLOWS, DYNAMIC
            )  # fmt: skip
        q = _rows(q_base, t, q_t, t < T, WIDTH, BK, INSIDE)
        dout = _rows(dout_base, t, o_t, t < T, WIDTH, BK, INSIDE)
        lse = tl.load(LSE + row0 + t, mask=t < T, other=0.0)
        inner = tl.load(INNER + row0 + t, mask=t < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_POSITIONS:
            rows = r_base + (tl.cast(t0, tl.int64) * r_step - t0)
            r_at = rows + (_table_rows(r_step, BM)[:, None] + j[None, :])
            r = tl.load(r_at) if INSIDE else tl.load(r_at, mask=(t < T)[:, None], other=0.0)
            s += r.to(tl.float32)
        share = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        if not INSIDE and own is not None:
            share = tl.where(_seen(t, j, own, filled, T, FIRST, HAS_FILLED), share, 0.0)
        dw = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        w = share
        mask = 1.0
        if HAS_SPANS and not INSIDE and end is not None:
            mask = _clamped(_unclamped_mask(end, t, j, slope))
            w = share * mask
        if HAS_DROPOUT:
            row_key = mixed((row0 + t).to(tl.uint32) ^ seed)
            kept = kept_places(row_key, j, threshold)
            dw = tl.where(kept, dw * keep_scale, 0.0)
            w = tl.where(kept, w, 0.0)
        ds = _score_gradient(share, dw, inner[:, None], mask, HAS_SPANS, RENORMALISE)
        dv += tl.dot(tl.trans(w.to(dout.dtype)), dout, input_precision=PRECISION)
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    Q, K, V, PAST, R, DOUT, LSE, INNER, HEADS, SPANS, SPAN_ENDS, FILLED, SEED, DK, DV, DPAST,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    B, H, T, ramp, slope, scale, threshold, keep_scale,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, FOLLOWS: tl.constexpr,
    DYNAMIC: tl.constexpr, HAS_FILLED: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys, of the block or of the past: the gradients of keys and values."""
    b = tl.program_id(1) % B
    h = H - 1 - tl.program_id(1) // B
    ends = tl.arange(0, 2) * (B * H) + b * H + h  # the shortest and the longest span of this text and head
    table, window, reach, edge = _head(
        HEADS, SPAN_ENDS, h, ends, ends >= 0, ramp, FIRST, HAS_SPANS, FOLLOWS, DYNAMIC
    )  # fmt: skip
    widest, far = _distances(edge, ramp, window, FIRST, HAS_SPANS, DYNAMIC)
    # The block's tiles come first, then those of the past, backwards: as many as the head has.
    tiles = tl.cdiv(T, BN)
    number = tl.program_id(0)
    n0 = tl.where(number < tiles, number * BN, (tiles - 1 - number) * BN)
    if n0 + BN > -reach:
        k_base = K + b.to(tl.int64) * k_b + h * k_h
        v_base = V + b.to(tl.int64) * v_b + h * v_h
        dk_base = DK + b.to(tl.int64) * dk_b + h * dk_h
        dv_base = DV + b.to(tl.int64) * dv_b + h * dv_h
        k_row, v_row, dk_row, dv_row = k_t, v_t, dk_t, dv_t
        if n0 < 0:
            k_row = tl.load(table + 5).to(tl.int32) * WIDTH
            v_row, dk_row, dv_row = k_row, k_row, k_row
            past = b * tl.load(table + 4) * WIDTH + reach * k_row
            past_k, past_v = past + tl.load(table + 2) * WIDTH, past + tl.load(table + 3) * WIDTH
            k_base, v_base, dk_base, dv_base = PAST + past_k, PAST + past_v, DPAST + past_k, DPAST + past_v
        q_base = Q + b.to(tl.int64) * q_b + h * q_h
        dout_base = DOUT + b.to(tl.int64) * o_b + h * o_h
        j = n0 + tl.arange(0, BN)
        there = (j >= -reach) & (j < T)
        dk = tl.zeros([BN, BK], tl.float32)
        dv = tl.zeros([BN, BK], tl.float32)

        start = tl.maximum(n0 + FIRST, 0) // 8 * 8
        stop = tl.minimum(n0 + BN - 1 + FIRST + widest, T)
        r_base, step = R, 8
        if HAS_POSITIONS:
            begin, step = _table_begin(table, b, 0, T)
            r_base = R + begin
        filled = tl.load(FILLED + b).to(tl.int32) if HAS_FILLED else reach
        seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)
        k = _rows(k_base, j, k_row, there, WIDTH, BK, False)
        v = _rows(v_base, j, v_row, there, WIDTH, BK, False)
        whole = (n0 >= -tl.minimum(reach, filled)) & (n0 + BN <= T)
        last = tl.where(whole, tl.minimum(n0 + far + 1, stop), 0)
        for part in tl.static_range(3):
            t0, t1 = _tiles_of(part, start, stop, n0 + BN - 1 + FIRST, last, BM)
            dk, dv = _key_gradient_tiles(
                t0, t1, dk, dv, k, v, j, q_base, dout_base, q_t, o_t,
                (b * H + h) * T, LSE, INNER, seed, r_base, step, HEADS, SPANS, h, window, filled, edge,
                T, ramp, slope, scale, threshold, keep_scale, FIRST, WIDTH, BK, BM, part == 1,
                HAS_POSITIONS, HAS_SPANS, RENORMALISE, FOLLOWS, DYNAMIC, HAS_FILLED, HAS_DROPOUT, PRECISION,
            )  # fmt: skip

        if HAS_DROPOUT:
            dv *= keep_scale
        _store_rows(dk_base, j, dk_row, there, dk * scale, WIDTH, BK)
        _store_rows(dv_base, j, dv_row, there, dv, WIDTH, BK)


@triton.jit
def persistent_gradient_kernel(
    Q, PERSISTENT_K, PERSISTENT_V, DOUT, LSE, INNER, SEED, DPERSISTENT_K, DPERSISTENT_V,
    q_b, q_h, q_t, o_b, o_h, o_t,
    B, H, T, P, texts, scale, threshold, keep_scale,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_SPANS: tl.constexpr, RENORMALISE: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of persistent vectors of one head, over `texts` rows of the batch: a part of their gradients."""
    part = tl.program_id(2)
    h = tl.program_id(1)
    p = tl.program_id(0) * BN + tl.arange(0, BN)
    p_row = h * P + p
    seed = tl.load(SEED).to(tl.uint32) if HAS_DROPOUT else tl.full([], 0, tl.uint32)
    k = _rows(PERSISTENT_K, p_row, WIDTH, p < P, WIDTH, BK, False)
    v = _rows(PERSISTENT_V, p_row, WIDTH, p < P, WIDTH, BK, False)
    dk = tl.zeros([BN, BK], tl.float32)
    dv = tl.zeros([BN, BK], tl.float32)
    for b in range(part * texts, tl.minimum((part + 1) * texts, B)):
        q_base = Q + tl.cast(b, tl.int64) * q_b + h * q_h
        dout_base = DOUT + tl.cast(b, tl.int64) * o_b + h * o_h
        # Queries beyond the block are zeros and add nothing; rows beyond the last vector are not stored.
        dk, dv = _key_gradient_tiles(
            0, T, dk, dv, k, v, p + PERSISTENT_BEGIN, q_base, dout_base, q_t, o_t,
            (b * H + h) * T, LSE, INNER, seed, None, 8, None, None, h, None, 0, None,
            T, 0.0, 0.0, scale, threshold, keep_scale, 0, WIDTH, BK, BM, False,
            False, HAS_SPANS, RENORMALISE, False, False, False, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    if HAS_DROPOUT:
        dv *= keep_scale
    _store_rows(DPERSISTENT_K, part * H * P + p_row, WIDTH, p < P, dk * scale, WIDTH, BK)
    _store_rows(DPERSISTENT_V, part * H * P + p_row, WIDTH, p < P, dv, WIDTH, BK)
