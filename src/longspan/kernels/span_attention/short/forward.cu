// Attention over short windows, without a table of distances.
//
// A program goes along a text's head, 128 queries at a step. Keys and values lie in a ring of rows, so that a
// step loads only those that are new: row n, before it wraps around, is the n-th position that the program
// sees.
//
// Of distances a warp has no more at a time than two pieces of 16 columns need. They are made 16 at a time,
// farthest first: distance 16k + x is seen by row r in column r - x of piece LAST_PIECE - k or, if that is
// negative, of the piece before. Rows g and g + 8 of a column lie in one word, so that a thread reads its
// four columns at once.

#define STEP_WARPS 8
#define STEP (16 * STEP_WARPS)
#define STEP_THREADS (32 * STEP_WARPS)
#define BATCH (STEP_THREADS / 8)  // rows that a program loads at once
#define PIECE_BYTES (16 * ROW_BYTES)
#define LAST_PIECE (NI / 16)  // that of the queries' own positions
// Queries of the next step come while this one is computed, if there is room for them beside the distances.
#define EARLY (NB <= 144)
#define DISTANCE_BYTES 1136
// Above it weights, or their sums with values, may be infinite.
#ifdef IS_BF16
#define LARGEST_SUM 1e30f
#else
#define LARGEST_SUM 3e4f
#endif

// ---- rows ----

// What a program needs only now and then lies in shared memory, for registers are short.
enum Note : u32 {
    NOTE_QUERIES = 0,  // where these begin for the text's head
    NOTE_OUT = 8,
    NOTE_KEYS = 16,
    NOTE_VALUES = 24,
    NOTE_POSITION = 32,  // that of row 0 of the ring
    NOTE_ROWS = 36,      // that the program goes through
    NOTE_SEEN = 40,      // batches of rows that a step sees
    NOTE_LSE = 44,       // the text's head, counted in queries
    NOTE_SEED = 48,
    NOTE_EDGE = 52,    // where the soft mask ends
    NOTE_WINDOW = 64,  // and the first pieces that are seen, that all rows see, and that have a mask of 1
    NOTE_PIECE = 68,
    NOTE_WHOLE = 72,
    NOTE_INSIDE = 76,
    NOTES_BYTES = 128
};

// Keys from `keys` on, then as many bytes of values.
struct Ring {
    u32 notes, keys, bytes;
    int k_step, v_step;
};

// Batches of rows that are not loaded yet: the first of them goes to `slot` of the ring.
__device__ __forceinline__ void load_batches(int loaded, int until, u32 slot, const Ring &ring) {
    if (loaded >= until) return;
    const int piece = threadIdx.x & 7, row = threadIdx.x >> 3;
    const int first = (int)shared32(ring.notes + NOTE_POSITION), rows = (int)shared32(ring.notes + NOTE_ROWS);
    int n = BATCH * loaded + row;
    const u16 *k = shared_pointer(ring.notes + NOTE_KEYS) + (i64)(first + n) * ring.k_step + piece * 8;
    const u16 *v = shared_pointer(ring.notes + NOTE_VALUES) + (i64)(first + n) * ring.v_step + piece * 8;
    const u32 to = ring.keys + row * ROW_BYTES + ((piece ^ swizzle<true>(row)) << 4);
#pragma unroll 1
    for (; n < BATCH * until; n += BATCH) {
        slot -= slot >= ring.bytes ? ring.bytes : 0;
        if (n < rows) {
            copy16(to + slot, k, true);
            copy16(to + slot + ring.bytes, v, true);
        }
        k += BATCH * (i64)ring.k_step;
        v += BATCH * (i64)ring.v_step;
        slot += BATCH * ROW_BYTES;
    }
}

// For up to 128 rows there is no room yet: at least they are near when there is.
__device__ __forceinline__ void fetch_rows(int loaded, int until, const Ring &ring) {
    const int n = BATCH * loaded + (threadIdx.x >> 1);
    const bool is_key = threadIdx.x & 1;
    if (n >= min(BATCH * until, (int)shared32(ring.notes + NOTE_ROWS))) return;
    const u16 *from =
        shared_pointer(ring.notes + (is_key ? NOTE_KEYS : NOTE_VALUES)) +
        (i64)((int)shared32(ring.notes + NOTE_POSITION) + n) * (is_key ? ring.k_step : ring.v_step);
    fetch(from);
}

// Those batches that begin in the past: how many there were.
__device__ __forceinline__ int load_past(int first, const Ring &ring, const u16 *past, const i64 *table,
                                         int b) {
    const int piece = threadIdx.x & 7, row = threadIdx.x >> 3, reach = (int)table[1];
    const i64 past_step = table[5] * 64;
    const u16 *k = shared_pointer(ring.notes + NOTE_KEYS) + piece * 8,
              *v = shared_pointer(ring.notes + NOTE_VALUES) + piece * 8;
    past += b * table[4] * 64 + reach * past_step + piece * 8;
    const u16 *past_k = past + table[2] * 64, *past_v = past + table[3] * 64;
    u32 to = ring.keys + row * ROW_BYTES + ((piece ^ swizzle<true>(row)) << 4);
    int batches = 0;
#pragma unroll 1
    for (int t = first + row; t < row; t += BATCH, to += BATCH * ROW_BYTES, batches++) {
        const bool there = t >= -reach;
        const i64 in_past = t * past_step;
        copy16(to, t >= 0 ? k + (i64)t * ring.k_step : there ? past_k + in_past : k, there);
        copy16(to + ring.bytes, t >= 0 ? v + (i64)t * ring.v_step : there ? past_v + in_past : v, there);
    }
    return batches;
}

// Row d is that of distance d, which is row d - FIRST of P.
__device__ __forceinline__ void load_by_distance(u32 to, const u16 *P, int length) {
    const int piece = threadIdx.x & 7;
#pragma unroll 1
    for (int d = threadIdx.x >> 3; d < NB; d += BATCH) {
        const bool there = (u32)(d - FIRST) < (u32)length;
        copy16(to + d * ROW_BYTES + ((piece ^ (d & 7)) << 4), P + (there ? (d - FIRST) * 64 : 0) + piece * 8,
               there);
    }
}

// 16 rows of this warp, of which a lane loads 16 bytes of four.
__device__ __forceinline__ void load_queries(u32 to, const u16 *from, int step) {
    const int lane = threadIdx.x & 31, row = lane >> 3, piece = lane & 7;
    const u32 first = to + row * ROW_BYTES + ((piece ^ row) << 4), second = (first ^ 64) + 4 * ROW_BYTES;
    from += (i64)row * step + piece * 8;
#pragma unroll
    for (int x = 0; x < 4; x++, from += 4 * (i64)step)
        copy16((x & 1 ? second : first) + (x >> 1) * 8 * ROW_BYTES, from, true);
}
__device__ __forceinline__ void take_queries(u32 (&a)[4][4], u32 from) {
    const int row = threadIdx.x & 15, piece = (threadIdx.x >> 4) & 1;
    from += row * ROW_BYTES + ((piece ^ (row & 7)) << 4);
#pragma unroll
    for (int k = 0; k < 4; k++) load4(a[k], from ^ (k << 5));
}

// Sums of products, by shared memory for 8 rows, the first half and then the second.
__device__ __forceinline__ void store_halves(u32 own, u16 *rows, int step, const float (&x)[8][4],
                                             const float (&factor)[2]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, row = lane >> 3, piece = lane & 7;
    own = (own + 127) & ~127u;
    const u32 to = own + g * ROW_BYTES + (g << 4) + q * 4;
    const u32 first = own + row * ROW_BYTES + ((piece ^ row) << 4), second = (first ^ 64) + 4 * ROW_BYTES;
    rows += (i64)row * step + piece * 8;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < 8; n++)
            to_shared32(to ^ (n << 4), both(x[n][2 * y] * factor[y], x[n][2 * y + 1] * factor[y]));
        __syncwarp();
        to_global128(rows, shared128(first));
        to_global128(rows + 4 * (i64)step, shared128(second));
        rows += 8 * (i64)step;
    }
}

// ---- distances ----

// Where a thread puts them and reads them, and what it has left of the last 16: those of row g + 8 that share
// words with the next.
struct Distances {
    u32 to, to_turned[2], from, keys;
    float left[2];
};

__device__ __forceinline__ Distances distances_of(u32 own, u32 position_keys) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, column = 16 + g - 2 * q;
    // So that reading finds no bank twice, and writing none more than twice.
    const u32 row = own + ((g >> 1) * 36 + (g & 1) * 144) * 4;
    Distances distances;
    distances.to = row + column * 4;
    distances.to_turned[0] = row + (column ^ 16) * 4;
    distances.to_turned[1] = row + ((column - 1) ^ 16) * 4;
    distances.from = row + q * 16;
    distances.keys = position_keys + (lane & 7) * ROW_BYTES + (((lane >> 3) ^ (lane & 7)) << 4);
    distances.left[0] = distances.left[1] = 0.0f;
    return distances;
}

// q . p for COUNT times 16 distances.
template <int COUNT>
__device__ __forceinline__ void make_distances16(float (&c)[COUNT][2][4], const u32 (&a)[4][4],
                                                 const u32 (&at)[COUNT]) {
#pragma unroll
    for (int p = 0; p < COUNT; p++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[p][n][e] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 x[COUNT][2][4];
#pragma unroll
        for (int p = 0; p < COUNT; p++)
#pragma unroll
            for (int n = 0; n < 2; n++) load4(x[p][n], (at[p] ^ (64 * half)) + n * 8 * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int p = 0; p < COUNT; p++)
#pragma unroll
                for (int n = 0; n < 2; n++)
                    product(c[p][n], a[2 * half + k], x[p][n][2 * k], x[p][n][2 * k + 1]);
    }
}
// Into the two pieces that see them: the first in columns 0 .. 15, the second in 16 .. 31 or, if TURNED, the
// other way round.
template <bool TURNED>
__device__ __forceinline__ void put_distances(Distances &to, const float (&c)[2][4]) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        to_shared32(TURNED ? to.to_turned[e] : to.to - 4 * e, both(c[0][e], c[1][2 + e]));
        to_shared32(to.to - 4 * e + (TURNED ? 32 : 0u - 32), both(c[1][e], to.left[e]));
        to.left[e] = c[0][2 + e];
    }
}
// After the nearest there are none, but what is left of them.
__device__ __forceinline__ void put_left(const Distances &to) {
#pragma unroll
    for (int e = 0; e < 2; e++) to_shared32(to.to - 4 * e - 32, both(0.0f, to.left[e]));
}
template <int PLACE>
__device__ __forceinline__ void take_distances(float (&s)[2][4], const Distances &from) {
    const uint4 x = shared128(from.from + PLACE * 64);
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        s[c >> 1][c & 1] = low_of(words[c]);
        s[c >> 1][2 + (c & 1)] = high_of(words[c]);
    }
}

// ---- scores and weights ----

__device__ __forceinline__ float most_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// A warp's 16 queries, and what a thread's rows g and g + 8 have in common over all pieces.
struct Queries {
    u32 a[4][4];
    int j0;            // the position of the thread's first column
    float far;         // how far inside the soft edge row g is there
    u32 row_key[2];    // for dropout
    u32 key_steps[4];  // from the hash of a column to that of the next, and of the next but one
};

struct Sums {
    float base[2], total[2], out[8][4];
};

__device__ __forceinline__ void load_keys(u32 (&x)[2][4], u32 at) {
#pragma unroll
    for (int n = 0; n < 2; n++) load4(x[n], at + n * 2 * ROW_BYTES);
}
template <int FROM>
__device__ __forceinline__ void add_scores(float (&c)[2][4], const u32 (&a)[4][4], const u32 (&x)[2][4]) {
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) product(c[n], a[FROM + k], x[n][2 * k], x[n][2 * k + 1]);
}

template <int PIECES>
__device__ __forceinline__ void step_pieces(int m, Sums &sums, Distances &distances, const Queries &queries,
                                            const u32 (&k_at)[PIECES], const u32 (&v_at)[PIECES], u32 notes,
                                            int settled, float slope, float scale2, u32 threshold) {
    float s[PIECES][2][4];
    if constexpr (PIECES == 2) {
        float c[2][2][4];
        // After the nearest 16 the same again, which nobody sees: what is left of them still has to be put.
        const u32 at = distances.keys + (LAST_PIECE - 1 - m) * PIECE_BYTES,
                  places[2] = {at, at - (m + 1 < LAST_PIECE ? PIECE_BYTES : 0)};
        make_distances16<2>(c, queries.a, places);
        u32 x[2][4], y[2][4];
        load_keys(x, k_at[0]);
        load_keys(y, k_at[0] ^ 64);
        __syncwarp();
        put_distances<false>(distances, c[0]);
        __syncwarp();
        take_distances<0>(s[0], distances);
        __syncwarp();
        put_distances<true>(distances, c[1]);
        add_scores<0>(s[0], queries.a, x);
        load_keys(x, k_at[1]);
        __syncwarp();
        take_distances<1>(s[1], distances);
        add_scores<2>(s[0], queries.a, y);
        load_keys(y, k_at[1] ^ 64);
        add_scores<0>(s[1], queries.a, x);
        add_scores<2>(s[1], queries.a, y);
    } else {
        put_left(distances);
        __syncwarp();
        take_distances<0>(s[0], distances);
        scores(s[0], queries.a, k_at[0]);
    }
    const uint4 look = shared128(notes + NOTE_WINDOW);
    const int window = look.x, first = look.y, whole = look.z, inside = look.w;
    const int lane = threadIdx.x & 31, i0 = NI - FIRST + (lane >> 2) - 4 * (lane & 3) - 16 * m;
    if (m < whole) {
        const int beyond = i0 - window;
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (beyond >= 16 * p + 2 * x + (e & 1) - (e >> 1) * 8) s[p][x][e] = -INFINITE;
    }
    if (m + PIECES > LAST_PIECE) {
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (i0 < 16 * (PIECES - 1) + 2 * x + (e & 1) - (e >> 1) * 8) s[PIECES - 1][x][e] = -INFINITE;
    }
    if (m < settled) {
        float top[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int e = 0; e < 4; e++) top[e >> 1] = fmaxf(top[e >> 1], s[p][x][e]);
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float base = fmaxf(sums.base[y], most_of_four(top[y]) * scale2);
            if (m > first) {
                const float shrink = power2(sums.base[y] - base);
                sums.total[y] *= shrink;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    sums.out[n][2 * y] *= shrink;
                    sums.out[n][2 * y + 1] *= shrink;
                }
            }
            sums.base[y] = base;
        }
    }
    float total[2] = {0, 0};
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[p][x][e] = power2(s[p][x][e] * scale2 - sums.base[e >> 1]);
                total[e >> 1] += s[p][x][e];
            }
    if (m < inside) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            total[y] *= EPS;  // of weights with a mask of 1 that is lost in rounding
            const float far = queries.far + (float)(16 * m - 8 * y);
#pragma unroll
            for (int p = 0; p < PIECES; p++)
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int e = 2 * y; e < 2 * y + 2; e++) {
                        s[p][x][e] *= __saturatef(((float)(16 * p + 2 * x + (e & 1)) + far) * slope);
                        total[y] += s[p][x][e];
                    }
        }
    }
    sums.total[0] += total[0];
    sums.total[1] += total[1];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        if (DROPS) {
#pragma unroll
            for (int y = 0; y < 2; y++) {
                u32 hash = (queries.row_key[y] ^ (u32)(queries.j0 + 16 * (m + p))) * HASH_FACTOR;
#pragma unroll
                for (int x = 0; x < 2; x++, hash += queries.key_steps[2 + y]) {
                    float *u = s[p][x] + 2 * y;
                    u[0] = is_kept(hash, threshold) ? u[0] : 0.0f;
                    u[1] = is_kept(hash + queries.key_steps[y], threshold) ? u[1] : 0.0f;
                }
            }
        }
        const u32 w[4] = {both(s[p][0][0], s[p][0][1]), both(s[p][0][2], s[p][0][3]),
                          both(s[p][1][0], s[p][1][1]), both(s[p][1][2], s[p][1][3])};
        add_product(sums.out, w, v_at[p]);
    }
}

// All pieces that a warp's queries see, from that on which lies at `at` of the ring.
__device__ __forceinline__ void step_queries(Sums &sums, const Queries &queries, u32 own, u32 position_keys,
                                             u32 keys, u32 ring_bytes, u32 at, u32 notes, int m, int settled,
                                             float slope, float scale2, u32 threshold) {
    const u32 k_lane = of_keys(keys), v_lane = of_turned_keys(keys + ring_bytes);
    Distances distances = distances_of(own, position_keys);
    sums = {{-INFINITE, -INFINITE}, {0, 0}, {}};
    {
        float c[1][2][4];
        make_distances16<1>(c, queries.a, {distances.keys + (LAST_PIECE - m) * PIECE_BYTES});
        __syncwarp();
        put_distances<true>(distances, c[0]);
    }
#pragma unroll 1
    for (; m < LAST_PIECE; m += 2) {
        const u32 first = at;
        at += PIECE_BYTES;
        at = at == ring_bytes ? 0 : at;
        step_pieces<2>(m, sums, distances, queries, {k_lane + first, k_lane + at},
                       {v_lane + first, v_lane + at}, notes, settled, slope, scale2, threshold);
        at += PIECE_BYTES;
        at = at == ring_bytes ? 0 : at;
    }
    if (m == LAST_PIECE) {
        __syncwarp();
        step_pieces<1>(m, sums, distances, queries, {k_lane + at}, {v_lane + at}, notes, settled, slope,
                       scale2, threshold);
    }
}

extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2)
    short_forward(const u16 *Q, const u16 *K, const u16 *V, const u16 *PAST, const u16 *P, u16 *OUT,
                  float *LSE, const i64 *HEADS, const float *SPANS, const int *SEED, i64 q_b, i64 q_h,
                  i64 q_t, i64 k_b, i64 k_h, i64 k_t, i64 v_b, i64 v_h, i64 v_t, i64 o_b, i64 o_h, i64 o_t,
                  int H, int T, int length, int ring_rows, int steps, int follows, float ramp, float slope,
                  float scale, u32 threshold, float keep_scale) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const int b = blockIdx.y, h = H - 1 - blockIdx.z;
    const int begin = blockIdx.x * steps * STEP, end = min(T, begin + steps * STEP);
    const u32 notes = shared_memory(), position_keys = notes + NOTES_BYTES;
    const Ring ring = {notes, position_keys + NB * ROW_BYTES, ring_rows * (u32)ROW_BYTES, (int)k_t, (int)v_t};
    const u32 owns = ring.keys + 2 * ring.bytes, own_queries = owns + warp * PIECE_BYTES,
              own = EARLY ? owns + STEP_WARPS * PIECE_BYTES + warp * DISTANCE_BYTES : own_queries;
    load_by_distance(position_keys, P, length);
    const i64 *table = HEADS + h * 8;
    const float edge = SPANS[h] + (FIRST + ramp);
    int window = (int)table[0];
    // No further than where the soft mask ends.
    if (follows) window = max(1, min(window, (int)floorf(edge) - FIRST + 1));
    const int skipped = max(0, NI - FIRST - window + 1) / 16;
    const int first = begin - NI + 16 * skipped;
    if (threadIdx.x == 0) {
        to_shared_pointer(notes + NOTE_QUERIES, Q + b * q_b + h * q_h);
        to_shared_pointer(notes + NOTE_OUT, OUT + b * o_b + h * o_h);
        to_shared_pointer(notes + NOTE_KEYS, K + b * k_b + h * k_h);
        to_shared_pointer(notes + NOTE_VALUES, V + b * v_b + h * v_h);
        to_shared32(notes + NOTE_POSITION, first);
        to_shared32(notes + NOTE_ROWS, end - first);
        to_shared32(notes + NOTE_SEEN, (NI - 16 * skipped + STEP + BATCH - 1) / BATCH);
        to_shared32(notes + NOTE_LSE, (b * H + h) * T);
        to_shared32(notes + NOTE_SEED, DROPS ? (u32)SEED[0] : 0);
        to_shared32(notes + NOTE_EDGE, __float_as_int(edge));
        to_shared32(notes + NOTE_WINDOW, window);
        to_shared32(notes + NOTE_PIECE, skipped);
        to_shared32(notes + NOTE_WHOLE, (max(0, NI - FIRST + 16 - window) + 15) / 16);
        to_shared32(notes + NOTE_INSIDE, max(0, NI + 15 - (int)floorf(edge - ramp) + 15) / 16);
    }
    __syncthreads();

    if (begin + warp * 16 < end)
        load_queries(own_queries, shared_pointer(notes + NOTE_QUERIES) + (i64)(begin + warp * 16) * (int)q_t,
                     (int)q_t);
    {
        const int past = first < 0 ? load_past(first, ring, PAST, table, b) : 0;
        load_batches(past, min((end - first + BATCH - 1) / BATCH, (int)shared32(notes + NOTE_SEEN)),
                     past * BATCH * ROW_BYTES, ring);
    }
    u32 step_at = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += STEP) {
        copies_end();
        wait_copies<0>();
        __syncthreads();
        // Loaded is what this step sees, and what there was room for. For more there is now.
        {
            const int done = (t0 - begin) / BATCH, seen = (int)shared32(notes + NOTE_SEEN),
                      batches = ((int)shared32(notes + NOTE_ROWS) + BATCH - 1) / BATCH;
            const int loaded = max(seen, t0 > begin ? (ring_rows - STEP) / BATCH : 0),
                      fit = min(batches, done + ring_rows / BATCH);
            load_batches(done + loaded, fit, step_at + loaded * BATCH * ROW_BYTES, ring);
            fetch_rows(fit, done + STEP / BATCH + seen, ring);
        }

        const int t_warp = t0 + warp * 16;
        if (t_warp < end) {
            const u32 row = shared32(notes + NOTE_LSE) + t_warp;
            Queries queries;
            take_queries(queries.a, own_queries);
            __syncwarp();
            if (EARLY && t_warp + STEP < end)
                load_queries(own_queries,
                             shared_pointer(notes + NOTE_QUERIES) + (i64)(t_warp + STEP) * (int)q_t,
                             (int)q_t);
            queries.j0 = t_warp - NI + 4 * q;
            queries.far = (__int_as_float(shared32(notes + NOTE_EDGE)) - (float)(NI + g - 4 * q));
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const u32 key = mixed((row + g + 8 * y) ^ shared32(notes + NOTE_SEED));
                queries.row_key[y] = key;
                queries.key_steps[y] = key & 1 ? 0u - HASH_FACTOR : HASH_FACTOR;
                queries.key_steps[2 + y] = key & 2 ? 0u - 2 * HASH_FACTOR : 2 * HASH_FACTOR;
            }
            u32 at = step_at + warp * PIECE_BYTES;
            at -= at >= ring.bytes ? ring.bytes : 0;
            Sums sums;
            // The base of exponents is that of the first keys: where others have grown too large, once more.
            for (bool careful = false;; careful = true) {
                const int piece = (int)shared32(notes + NOTE_PIECE);
                step_queries(sums, queries, own, position_keys, ring.keys, ring.bytes, at, notes, piece,
                             careful ? LAST_PIECE + 1 : piece + 1, slope, scale * LOG2E, threshold);
                const bool fits = sums.total[0] < LARGEST_SUM && sums.total[1] < LARGEST_SUM;
                if (careful || __all_sync(~0u, fits)) break;
            }
            float factor[2];
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const float total = over_four(sums.total[y]);
                factor[y] = (DROPS ? keep_scale : 1.0f) * inverse(total);
                if (q == 0)
                    LSE[shared32(notes + NOTE_LSE) + t_warp + g + 8 * y] = sums.base[y] + logarithm2(total);
            }
            store_halves(own, (u16 *)shared_pointer(notes + NOTE_OUT) + (i64)t_warp * (int)o_t, (int)o_t,
                         sums.out, factor);
        }
        if (!EARLY && t0 + STEP + warp * 16 < end) {
            __syncwarp();
            load_queries(own_queries,
                         shared_pointer(notes + NOTE_QUERIES) + (i64)(t0 + STEP + warp * 16) * (int)q_t,
                         (int)q_t);
        }
        __syncthreads();
        {
            const int done = (t0 - begin) / BATCH,
                      batches = ((int)shared32(notes + NOTE_ROWS) + BATCH - 1) / BATCH;
            load_batches(done + ring_rows / BATCH,
                         min(batches, done + STEP / BATCH + (int)shared32(notes + NOTE_SEEN)),
                         step_at + ring.bytes, ring);
        }
        step_at += STEP * ROW_BYTES;
        step_at -= step_at >= ring.bytes ? ring.bytes : 0;
    }
}
