// Gradients of attention over short windows, in two passes and a sum.
//
// The first has tiles of 64 queries. It makes the weights once more, the gradients of the scores, and from
// them those of queries, spans and position keys. Both it leaves behind, turned: weights and gradients of 16
// queries and 16 keys as the left side of a product. In the second pass programs have tiles of keys, and for
// those of keys and values there are only products to be made. Programs sum up position keys and spans apart;
// the last kernel adds these sums.
//
// q . p_i is made for all i of a row and put into shared memory, from where it is read askew; the gradient of
// the score is put in its place.

#define WARPS 4
#define THREADS (32 * WARPS)
#define TILE (16 * WARPS)      // queries, or keys, of a program
#define ROWS (NB + TILE - 16)  // keys that its queries see
#define STRIDE (NI + 8)        // numbers of a row of distances in shared memory
#define WARP_DISTANCES ((16 * STRIDE * 2 < 32 * ROW_BYTES ? 32 * ROW_BYTES : 16 * STRIDE * 2) + 64)

// ---- what a head looks at ----

struct Head {
    int window, reach, skipped;
    float edge;
    const i64 *table;
};

__device__ __forceinline__ Head head_of(const i64 *heads, const float *spans, int h, float ramp,
                                        int follows) {
    Head head;
    head.table = heads + h * 8;
    head.window = (int)head.table[0];
    head.reach = (int)head.table[1];
    head.edge = spans[h] + (FIRST + ramp);
    // No further than where the soft mask ends, which still passes a gradient to the span.
    if (follows) head.window = min(head.window, (int)floorf(head.edge) - FIRST + 1);
    head.skipped = max(0, NI - head.window) / 16;  // pieces of 16 columns that no row sees
    return head;
}

// Rows `begin` .. `end` of a tile whose row 0 is at position `first`; zeros for those that are not there.
template <bool PERMUTED>
__device__ __forceinline__ void load_rows(u32 to, const u16 *block, i64 step, const u16 *past, i64 past_step,
                                          int first, int begin, int end, int reach, int T) {
    int n = begin + (threadIdx.x >> 3), piece = threadIdx.x & 7;
    to += n * ROW_BYTES + ((piece ^ swizzle<PERMUTED>(n)) << 4);
    const int in_block = min(end, T - first);
    if (first + begin < 0) {
        const u16 *from = past + (first + n) * past_step + piece * 8;
        past_step *= THREADS / 8;
        for (; first + n < 0 && n < end; n += THREADS / 8, to += THREADS / 8 * ROW_BYTES, from += past_step) {
            const bool there = first + n >= -reach;
            copy16(to, there ? from : block, there);
        }
    }
    const u16 *from = block + (first + n) * step + piece * 8;
    step *= THREADS / 8;
#pragma unroll 4
    for (; n < in_block; n += THREADS / 8, to += THREADS / 8 * ROW_BYTES, from += step)
        copy16(to, from, true);
    for (; n < end; n += THREADS / 8, to += THREADS / 8 * ROW_BYTES) copy16(to, block, false);
}

__device__ __forceinline__ void load_keys_or_values(u32 to, const u16 *block, const u16 *past,
                                                    const Head &head, int b, int h, int which, i64 s_b,
                                                    i64 s_h, i64 s_t, int first, int T) {
    const i64 past_step = head.table[5] * 64;
    load_rows<true>(to, block + b * s_b + h * s_h, s_t,
                    past + (b * head.table[4] + head.table[2 + which]) * 64 + head.reach * past_step,
                    past_step, first, 16 * head.skipped, ROWS, head.reach, T);
}

__device__ __forceinline__ void load_position_keys(u32 to, const u16 *P, int length) {
    load_rows<false>(to, P, 64, P, 64, 0, 0, NI, 0, length);
}

// 16 rows of this warp to or from shared memory.
__device__ __forceinline__ void load_own(u32 to, const u16 *rows, i64 step) {
    const int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll
    for (int row = lane >> 3; row < 16; row += 4)
        copy16(to + row * ROW_BYTES + ((piece ^ (row & 7)) << 4), rows + row * step + piece * 8, true);
}
__device__ __forceinline__ void left_side(u32 (&a)[4][4], u32 from) {
    const int row = threadIdx.x & 15, piece = (threadIdx.x >> 4) & 1;
#pragma unroll
    for (int k = 0; k < 4; k++) load4(a[k], from + row * ROW_BYTES + (((2 * k + piece) ^ (row & 7)) << 4));
}
// Sums of products, by shared memory into rows of their own or, if PERMUTED, of keys; no row before `first`.
template <bool PERMUTED>
__device__ __forceinline__ void store_own(u32 own, u16 *rows, i64 step, const float (&x)[8][4], float low,
                                          float high, int first) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, piece = lane & 7;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int row = PERMUTED ? 4 * (g >> 1) + (g & 1) + 2 * y : g + 8 * y;
        const float factor = y ? high : low;
#pragma unroll
        for (int n = 0; n < 8; n++)
            to_shared32(own + row * ROW_BYTES + ((n ^ (row & 7)) << 4) + q * 4,
                        both(x[n][2 * y] * factor, x[n][2 * y + 1] * factor));
    }
    __syncwarp();
#pragma unroll
    for (int row = lane >> 3; row < 16; row += 4)
        if (row >= first)
            *(uint4 *)(rows + row * step + piece * 8) =
                shared128(own + row * ROW_BYTES + ((piece ^ (row & 7)) << 4));
}

// q . p_i for all i below `window`, into this warp's rows of distances.
__device__ __forceinline__ void make_distances(u32 own, u32 keys, const u32 (&a)[4][4], int window) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    u32 at = keys + (lane & 7) * ROW_BYTES + (((lane >> 3) ^ (lane & 7)) << 4);
    u32 to = own + (g * STRIDE + 2 * q) * 2;
#pragma unroll 1
    for (int i = 0; i < window; i += 16, at += 16 * ROW_BYTES, to += 32) {
        float c[2][4] = {};
        scores<8>(c, a, at);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            to_shared32(to + n * 16, both(c[n][0], c[n][1]));
            to_shared32(to + n * 16 + 8 * STRIDE * 2, both(c[n][2], c[n][3]));
        }
    }
    __syncwarp();
}

// Of 16 rows that lie as they come.
__device__ __forceinline__ u32 of_turned_rows(u32 base) {
    const int lane = threadIdx.x & 31, n = lane & 7, row = n + 8 * ((lane >> 3) & 1);
    return base + row * ROW_BYTES + (((lane >> 4) ^ n) << 4);
}

// What a thread's rows g and g + 8 have in common over all pieces of 16 keys.
struct Band {
    u32 r_at, k_at, v_at;  // distances, keys and values as it reads them
    int row_i, j0;         // i and position at its first column
    float far[2];          // how far inside the soft edge that is
    u32 row_key[2];        // for dropout
};

__device__ __forceinline__ Band band_of(const Head &head, u32 own, u32 keys, u32 values, int row, int t_warp,
                                        u32 seed) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    Band band;
    band.row_i = NI + g - FIRST - 4 * q;
    band.j0 = t_warp - NI + 4 * q;
    band.r_at = own + (g * STRIDE + band.row_i) * 2;
    band.k_at = keys + warp * 16 * ROW_BYTES;
    band.v_at = values + warp * 16 * ROW_BYTES;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        band.far[y] = head.edge - (float)(NI + g + 8 * y - 4 * q);
        band.row_key[y] = mixed((u32)(row + g + 8 * y) ^ seed);
    }
    return band;
}
// The distance term at column c0 + (e & 1) of row g or g + 8.
__device__ __forceinline__ u32 distance_at(const Band &band, int c0, int e) {
    return band.r_at + ((e >> 1) * (8 * STRIDE + 8) - (e & 1)) * 2 - c0 * 2;
}
// The first piece of which every row sees every column through a mask of 1; the pieces that see the queries'
// own positions come after those.
__device__ __forceinline__ int first_inside(const Head &head, float ramp) {
    const int far = min(FIRST + head.window - 1, (int)ceilf(head.edge - ramp) - 1);
    return max(head.skipped, min(NB / 16, (NI + 15 - far + 15) / 16));
}
#define BEYOND_INSIDE ((NI - FIRST - 15) / 16 + 1)

// ---- gradients of queries, spans and position keys ----

// 16 keys: weights and gradients of scores, turned, for the keys' kernel, and what they give the queries.
template <bool INSIDE>
__device__ __forceinline__ void query_piece(int m, float (&dq)[8][4], float &dspan, const u32 (&a)[4][4],
                                            const u32 (&da)[4][4], const Band &band, u32 k_at, u32 v_at,
                                            u32 k_turned_at, const float (&lse)[2], const float (&inner)[2],
                                            int window, float slope, float scale2, u32 threshold,
                                            float keep_scale, uint4 *kept_at) {
    u32 ws[4], ds[4];
    float s[2][4], dw[2][4] = {};
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[x][e] = wide(shared16(distance_at(band, 16 * m + 2 * x, e)));
    scores(s, a, k_at + m * 16 * ROW_BYTES);
    scores(dw, da, v_at + m * 16 * ROW_BYTES);
    const int i0 = band.row_i - 16 * m, j0 = band.j0 + 16 * m;
    const float far[2] = {band.far[0] + (float)(16 * m), band.far[1] + (float)(16 * m)};
#pragma unroll
    for (int x = 0; x < 2; x++) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int c = 2 * x + (e & 1), y = e >> 1;
            float share = power2(s[x][e] * scale2 - lse[y]);
            if (!INSIDE) share = (u32)(i0 + y * 8 - c) < (u32)window ? share : 0.0f;
            const bool kept =
                DROPS ? is_kept((band.row_key[y] ^ (u32)(j0 + c)) * HASH_FACTOR, threshold) : true;
            float d = DROPS ? fmaf(dw[x][e], keep_scale, -inner[y]) : dw[x][e] - inner[y];
            if (DROPS) d = kept ? d : -inner[y];
            w[e] = share;
            if (!INSIDE) {
                const float rise = (far[y] + (float)c) * slope, mask = __saturatef(rise);
                if (rise >= 0.0f && rise <= 1.0f) dspan += share * d;
                w[e] *= mask;
                d *= mask;
            }
            if (DROPS) w[e] = kept ? w[e] : 0.0f;
            s[x][e] = share * (d - EPS * inner[y]);
        }
        ws[2 * x] = both(w[0], w[1]);
        ws[2 * x + 1] = both(w[2], w[3]);
        ds[2 * x] = both(s[x][0], s[x][1]);
        ds[2 * x + 1] = both(s[x][2], s[x][3]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u16 half = (u16)((e & 1) ? ds[2 * x + (e >> 1)] >> 16 : ds[2 * x + (e >> 1)]);
            if (INSIDE || (u32)(i0 + (e >> 1) * 8 - 2 * x - (e & 1)) < (u32)NI)
                to_shared16(distance_at(band, 16 * m + 2 * x, e), half);
        }
    }
    add_product(dq, ds, k_turned_at + m * 16 * ROW_BYTES);
    // Keys in rows, queries in columns: tiles of keys one after the other, as the left side of a product.
    kept_at[m * 64] = make_uint4(turned(ws[0]), turned(ws[2]), turned(ws[1]), turned(ws[3]));
    kept_at[m * 64 + 32] = make_uint4(turned(ds[0]), turned(ds[2]), turned(ds[1]), turned(ds[3]));
}

#define PARTS ((NI / 16 + WARPS - 1) / WARPS)  // tiles of 16 position keys that a warp sums up

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    short_query_gradient(const u16 *Q, const u16 *K, const u16 *V, const u16 *PAST, const u16 *P,
                         const u16 *OUT, const u16 *DOUT, const float *LSE, const i64 *HEADS,
                         const float *SPANS, const int *SEED, u16 *DQ, uint4 *KEPT, float *DSPAN, float *DP,
                         i64 q_b, i64 q_h, i64 q_t, i64 k_b, i64 k_h, i64 k_t, i64 v_b, i64 v_h, i64 v_t,
                         i64 o_b, i64 o_h, i64 o_t, i64 do_b, i64 do_h, i64 do_t, i64 dq_b, i64 dq_h,
                         i64 dq_t, int B, int H, int T, int length, int follows, float ramp, float slope,
                         float scale, u32 threshold, float keep_scale) {
    const u32 keys = shared_memory(), values = keys + ROWS * ROW_BYTES,
              position_keys = values + ROWS * ROW_BYTES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    const u32 distances = position_keys + NI * ROW_BYTES;
    const u32 own = distances + warp * WARP_DISTANCES + 32;
    const u32 seed = DROPS ? (u32)SEED[0] : 0;
    const int tiles = T / TILE;
    const float scale2 = scale * LOG2E;
    float dp[PARTS][8][4] = {};
    float *dp_at = DP + ((i64)blockIdx.x * NI + warp * 16 + g) * 64 + (lane & 3) * 2;

    load_position_keys(position_keys, P, length);
    copies_end();
    wait_copies<0>();
    __syncthreads();
    for (int tile = blockIdx.x; tile < tiles * B * H; tile += gridDim.x) {
        const int pair = tile / tiles, b = pair % B, h = H - 1 - pair / B, t0 = tile % tiles * TILE,
                  t_warp = t0 + warp * 16;
        const Head head = head_of(HEADS, SPANS, h, ramp, follows);
        load_own(own, Q + b * q_b + h * q_h + t_warp * q_t, q_t);
        load_own(own + 16 * ROW_BYTES, DOUT + b * do_b + h * do_h + t_warp * do_t, do_t);
        copies_end();
        load_keys_or_values(keys, K, PAST, head, b, h, 0, k_b, k_h, k_t, t0 - NI, T);
        load_keys_or_values(values, V, PAST, head, b, h, 1, v_b, v_h, v_t, t0 - NI, T);
        copies_end();
        const int row = (b * H + h) * T + t_warp;
        float dq[8][4] = {}, dspan = 0;
        u32 a[4][4];
        {
            float part[4], inner[2];
            const float lse[2] = {LSE[row + g], LSE[row + g + 8]};
            uint4 outs[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                outs[k] = *(const uint4 *)(OUT + b * o_b + h * o_h + (t_warp + (lane >> 3) + 4 * k) * o_t +
                                           (lane & 7) * 8);
            wait_copies<1>();
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int r = (lane >> 3) + 4 * k;
                const uint4 o = outs[k],
                            d = shared128(own + (16 + r) * ROW_BYTES + (((lane & 7) ^ (r & 7)) << 4));
                float x = low_of(o.x) * low_of(d.x) + high_of(o.x) * high_of(d.x) +
                          low_of(o.y) * low_of(d.y) + high_of(o.y) * high_of(d.y);
                x += low_of(o.z) * low_of(d.z) + high_of(o.z) * high_of(d.z) + low_of(o.w) * low_of(d.w) +
                     high_of(o.w) * high_of(d.w);
                x += __shfl_xor_sync(~0u, x, 4);
                part[k] = over_four(x);
            }
            // Row r is with the lanes from 8 (r % 4) on, as part r / 4.
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const float low = __shfl_sync(~0u, part[2 * y], (g & 3) * 8),
                            high = __shfl_sync(~0u, part[2 * y + 1], (g & 3) * 8);
                inner[y] = g < 4 ? low : high;
            }
            u32 da[4][4];
            left_side(a, own);
            left_side(da, own + 16 * ROW_BYTES);
            __syncwarp();
            make_distances(own, position_keys, a, head.window);
            const Band band = band_of(head, own, keys, values, row, t_warp, seed);
            const u32 k_at = of_keys(band.k_at), v_at = of_keys(band.v_at),
                      k_turned_at = of_turned_keys(band.k_at);
            const int inside = first_inside(head, ramp), end = max(inside, BEYOND_INSIDE);
            uint4 *kept_at = KEPT + (i64)(pair * (T / 16) + t_warp / 16) * (NB / 16) * 64 + lane;
            wait_copies<0>();
            __syncthreads();
            int m = head.skipped;
#pragma unroll 1
            for (; m < inside; m++)
                query_piece<false>(m, dq, dspan, a, da, band, k_at, v_at, k_turned_at, lse, inner,
                                   head.window, slope, scale2, threshold, keep_scale, kept_at);
#pragma unroll 1
            for (; m < end; m++)
                query_piece<true>(m, dq, dspan, a, da, band, k_at, v_at, k_turned_at, lse, inner, head.window,
                                  slope, scale2, threshold, keep_scale, kept_at);
#pragma unroll 1
            for (; m < NB / 16; m++)
                query_piece<false>(m, dq, dspan, a, da, band, k_at, v_at, k_turned_at, lse, inner,
                                   head.window, slope, scale2, threshold, keep_scale, kept_at);
        }
        dspan = over_four(dspan);
        dspan += __shfl_xor_sync(~0u, dspan, 4);
        dspan += __shfl_xor_sync(~0u, dspan, 8);
        dspan += __shfl_xor_sync(~0u, dspan, 16);
        if (lane == 0) DSPAN[((h * B + b) * T + t_warp) / 16] = dspan * slope;
        __syncwarp();
        // What the distances give the queries: rows of gradients times position keys.
        const int used = (head.window + 15) / 16;
        {
            const u32 left = own + ((lane & 15) * STRIDE + (lane >> 4) * 8) * 2,
                      right = of_turned_rows(position_keys);
#pragma unroll 1
            for (int m = 0; m < used; m++) {
                u32 x[4];
                load4(x, left + m * 32);
                add_product(dq, x, right + m * 16 * ROW_BYTES);
            }
        }
        // And the queries the position keys: queries where values were, to be read turned.
        __syncthreads();
        store_own<false>(keys + warp * 16 * ROW_BYTES, DQ + b * dq_b + h * dq_h + t_warp * dq_t, dq_t, dq,
                         scale, scale, 0);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int piece = 2 * k + (x >> 1), r = g + 8 * (x & 1);
                to_shared32(values + (warp * 16 + r) * ROW_BYTES + ((piece ^ (r & 7)) << 4) + (lane & 3) * 4,
                            a[k][x]);
            }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int tile_i = warp + WARPS * part;
            if (tile_i < used) {
                // Of the queries: the left side has distances in rows.
                const int r = (lane & 7) + 8 * (lane >> 4);
                const u32 left = distances + 32 + (r * STRIDE + tile_i * 16 + 8 * ((lane >> 3) & 1)) * 2,
                          right = of_turned_rows(values);
#pragma unroll 2
                for (int w = 0; w < WARPS; w++) {
                    u32 x[4];
                    load4_turned(x, left + w * WARP_DISTANCES);
                    add_product(dp[part], x, right + w * 16 * ROW_BYTES);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int tile_i = warp + WARPS * part;
        if (tile_i < NI / 16) {
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int n = 0; n < 8; n++)
                    *(float2 *)(dp_at + (part * WARPS * 16 + x * 8) * 64 + n * 8) =
                        make_float2(dp[part][n][2 * x], dp[part][n][2 * x + 1]);
        }
    }
}

// ---- gradients of keys and values ----

#define AHEAD 8  // pieces that are on their way

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    short_key_gradient(const u16 *Q, const u16 *DOUT, const uint4 *KEPT, const i64 *HEADS, const float *SPANS,
                       u16 *DK, u16 *DV, u16 *DPAST, i64 q_b, i64 q_h, i64 q_t, i64 do_b, i64 do_h, i64 do_t,
                       i64 dk_b, i64 dk_h, i64 dk_t, i64 dv_b, i64 dv_h, i64 dv_t, int B, int H, int T,
                       int follows, float ramp, float scale, float keep_scale) {
    const u32 queries = shared_memory(), gradients = queries + ROWS * ROW_BYTES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // What was written last is read first: some of it is still near.
    const int pair = B * H - 1 - blockIdx.y, b = pair % B, h = H - 1 - pair / B;
    const int tiles = T / TILE, number = gridDim.x - 1 - blockIdx.x;
    const int n0 = (number < tiles ? number : tiles - 1 - number) * TILE;
    const Head head = head_of(HEADS, SPANS, h, ramp, follows);
    if (n0 + TILE <= -head.reach) return;
    const int seen = (NB / 16 - head.skipped) * 16 + TILE - 16;  // rows that some key here is seen by
    load_rows<false>(queries, Q + b * q_b + h * q_h, q_t, Q, 0, n0, 0, seen, 0, T);
    load_rows<false>(gradients, DOUT + b * do_b + h * do_h, do_t, DOUT, 0, n0, 0, seen, 0, T);
    copies_end();
    const int j0 = n0 + warp * 16;
    float dk[8][4] = {}, dv[8][4] = {};
    const u32 q_at = of_turned_rows(queries + warp * 16 * ROW_BYTES),
              d_at = of_turned_rows(gradients + warp * 16 * ROW_BYTES);
    // Queries in groups of 16, the k-th after the keys' own: they have these keys in piece NB / 16 - 1 - k.
    const int begin = max(0, -j0 / 16), end = min(NB / 16 - head.skipped, (T - j0) / 16);
    const uint4 *kept = KEPT + ((i64)(pair * (T / 16) + j0 / 16) * (NB / 16) + NB / 16 - 1) * 64 + lane;
    const int step = (NB / 16 - 1) * 64;
    uint4 w_next[AHEAD], d_next[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; n++)
        if (begin + n < end) {
            w_next[n] = kept[(begin + n) * step];
            d_next[n] = kept[(begin + n) * step + 32];
        }
    wait_copies<0>();
    __syncthreads();
    for (int k0 = begin; k0 < end; k0 += AHEAD) {
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const int k = k0 + n;
            if (k < end) {
                const u32 w[4] = {w_next[n].x, w_next[n].y, w_next[n].z, w_next[n].w},
                          d[4] = {d_next[n].x, d_next[n].y, d_next[n].z, d_next[n].w};
                if (k + AHEAD < end) {
                    w_next[n] = kept[(k + AHEAD) * step];
                    d_next[n] = kept[(k + AHEAD) * step + 32];
                }
                add_product(dv, w, d_at + k * 16 * ROW_BYTES);
                add_product(dk, d, q_at + k * 16 * ROW_BYTES);
            }
        }
    }
    u16 *to_k, *to_v;
    i64 k_step, v_step;
    if (n0 < 0) {
        k_step = v_step = head.table[5] * 64;
        u16 *past = DPAST + b * head.table[4] * 64 + head.reach * k_step;
        to_k = past + head.table[2] * 64;
        to_v = past + head.table[3] * 64;
    } else {
        to_k = DK + b * dk_b + h * dk_h;
        to_v = DV + b * dv_b + h * dv_h;
        k_step = dk_t;
        v_step = dv_t;
    }
    __syncthreads();
    store_own<true>(queries + warp * 16 * ROW_BYTES, to_k + j0 * k_step, k_step, dk, scale, scale,
                    -head.reach - j0);
    store_own<true>(gradients + warp * 16 * ROW_BYTES, to_v + j0 * v_step, v_step, dv, keep_scale, keep_scale,
                    -head.reach - j0);
}

// ---- what programs have summed up apart ----

// The first blocks have 32 numbers of the position keys' gradient each, the last ones a head's span each.
extern "C" __global__ void __launch_bounds__(THREADS)
    short_sums(const float *DP, const float *DSPAN, float *DPOSITION_KEYS, float *DSPANS, int programs,
               int of_head, int numbers, float scale) {
    __shared__ float parts[THREADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = numbers / 32;
    float sum = 0;
    if (blockIdx.x < blocks) {
        const int at = blockIdx.x * 32 + lane;
        if (at < NI * 64)
            for (int n = warp; n < programs; n += WARPS) sum += DP[(i64)n * NI * 64 + at];
    } else {
        for (int n = threadIdx.x; n < of_head; n += THREADS)
            sum += DSPAN[(i64)(blockIdx.x - blocks) * of_head + n];
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int n = 1; n < WARPS; n++) sum += parts[n * 32 + lane];
    if (blockIdx.x < blocks) {
        DPOSITION_KEYS[blockIdx.x * 32 + lane] = sum * scale;
    } else {
#pragma unroll
        for (int n = 1; n < 32; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
        if (lane == 0) DSPANS[blockIdx.x - blocks] = sum;
    }
}
