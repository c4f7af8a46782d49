
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

// ---- forward ----

struct Sums {
    float base[2], z[2], y[2], out[8][4];
};

template <int PIECES, bool INSIDE>
__device__ __forceinline__ void forward_pieces(int m, Sums &sums, const Band &band, const u32 (&a)[4][4],
                                               u32 k_at, u32 v_at, int window, float slope, float scale2,
                                               u32 threshold) {
    float s[PIECES][2][4];
    float top[2] = {-INFINITE, -INFINITE};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[p][x][e] = wide(shared16(distance_at(band, 16 * (m + p) + 2 * x, e)));
        scores(s[p], a, k_at + (m + p) * 16 * ROW_BYTES);
    }
    const int i0 = band.row_i - 16 * m;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (!INSIDE)
                    s[p][x][e] = (u32)(i0 + (e >> 1) * 8 - 16 * p - 2 * x - (e & 1)) < (u32)window
                                     ? s[p][x][e]
                                     : -INFINITE;
                top[e >> 1] = fmaxf(top[e >> 1], s[p][x][e]);
            }
    // The base of exponents moves only if they would grow too large: it cancels.
    bool grows = false;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        top[y] = most_of_four(top[y]) * scale2;
        grows |= top[y] > sums.base[y] + 8.0f;
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float base = fmaxf(sums.base[y], top[y]),
                        shrink = base > -INFINITE ? power2(sums.base[y] - base) : 1.0f;
            sums.z[y] *= shrink;
            sums.y[y] *= shrink;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                sums.out[n][2 * y] *= shrink;
                sums.out[n][2 * y + 1] *= shrink;
            }
            sums.base[y] = base;
        }
    }
    float base[2];
#pragma unroll
    for (int y = 0; y < 2; y++) base[y] = INSIDE || sums.base[y] > -INFINITE ? sums.base[y] : 0.0f;
    const float c0 = (float)(16 * m);
    const float far[2] = {band.far[0] + c0, band.far[1] + c0};
    const int j0 = band.j0 + 16 * m;
    float z[2] = {0, 0}, masked[2] = {0, 0};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        u32 w[4];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float u[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int y = e >> 1, c = 16 * p + 2 * x + (e & 1);
                u[e] = power2(s[p][x][e] * scale2 - base[y]);
                z[y] += u[e];
                if (!INSIDE) {
                    u[e] *= __saturatef((far[y] + (float)c) * slope);
                    masked[y] += u[e];
                }
                if (DROPS) u[e] = is_kept(band.row_key[y], j0 + c, threshold) ? u[e] : 0.0f;
            }
            w[2 * x] = both(u[0], u[1]);
            w[2 * x + 1] = both(u[2], u[3]);
        }
        add_product(sums.out, w, v_at + (m + p) * 16 * ROW_BYTES);
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        sums.z[y] += z[y];
        sums.y[y] += INSIDE ? z[y] : masked[y];
    }
}

// The pieces from m to `end`, two at a time.
template <bool INSIDE>
__device__ __forceinline__ void forward_run(int m, int end, Sums &sums, const Band &band,
                                            const u32 (&a)[4][4], u32 k_at, u32 v_at, int window, float slope,
                                            float scale2, u32 threshold) {
    if ((end - m) & 1)
        forward_pieces<1, INSIDE>(m++, sums, band, a, k_at, v_at, window, slope, scale2, threshold);
#pragma unroll 1
    for (; m < end; m += 2)
        forward_pieces<2, INSIDE>(m, sums, band, a, k_at, v_at, window, slope, scale2, threshold);
}

extern "C" __global__ void __launch_bounds__(THREADS, NB > 128 ? 2 : 3)
    short_forward(const u16 *Q, const u16 *K, const u16 *V, const u16 *PAST, const u16 *P, u16 *OUT,
                  float *LSE, const i64 *HEADS, const float *SPANS, const int *SEED, i64 q_b, i64 q_h,
                  i64 q_t, i64 k_b, i64 k_h, i64 k_t, i64 v_b, i64 v_h, i64 v_t, i64 o_b, i64 o_h, i64 o_t,
                  int B, int H, int T, int length, int follows, float ramp, float slope, float scale,
                  u32 threshold, float keep_scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 keys = shared_at(memory), values = keys + ROWS * ROW_BYTES,
              position_keys = values + ROWS * ROW_BYTES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 own = position_keys + NI * ROW_BYTES + warp * WARP_DISTANCES + 32;
    const int b = blockIdx.y % B, h = H - 1 - blockIdx.y / B;
    const int t0 = blockIdx.x * TILE, t_warp = t0 + warp * 16;
    const Head head = head_of(HEADS, SPANS, h, ramp, follows);

    load_own(own, Q + b * q_b + h * q_h + t_warp * q_t, q_t);
    load_position_keys(position_keys, P, length);
    copies_end();
    load_keys_or_values(keys, K, PAST, head, b, h, 0, k_b, k_h, k_t, t0 - NI, T);
    load_keys_or_values(values, V, PAST, head, b, h, 1, v_b, v_h, v_t, t0 - NI, T);
    copies_end();
    const u32 seed = DROPS ? (u32)SEED[0] : 0;
    const int row = (b * H + h) * T + t_warp;
    const Band band = band_of(head, own, keys, values, row, t_warp, seed);
    const float scale2 = scale * LOG2E;
    wait_copies<1>();
    __syncthreads();
    u32 a[4][4];
    left_side(a, own);
    __syncwarp();
    make_distances(own, position_keys, a, head.window);
    wait_copies<0>();
    __syncthreads();

    Sums sums = {{-INFINITE, -INFINITE}, {0, 0}, {0, 0}, {}};
    const u32 k_at = of_keys(band.k_at), v_at = of_turned_keys(band.v_at);
    const int inside = first_inside(head, ramp), end = max(inside, BEYOND_INSIDE);
    forward_run<false>(head.skipped, inside, sums, band, a, k_at, v_at, head.window, slope, scale2,
                       threshold);
    forward_run<true>(inside, end, sums, band, a, k_at, v_at, head.window, slope, scale2, threshold);
    forward_run<false>(end, NB / 16, sums, band, a, k_at, v_at, head.window, slope, scale2, threshold);

    float factor[2];
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float total = over_four(sums.y[y]) + EPS * over_four(sums.z[y]);
        factor[y] = (DROPS ? keep_scale : 1.0f) / total;
        if (q == 0) LSE[row + g + 8 * y] = sums.base[y] + log2f(total);
    }
    __syncwarp();
    store_own<false>(own, OUT + b * o_b + h * o_h + t_warp * o_t, o_t, sums.out, factor[0], factor[1], 0);
}
