// Attention of heads that look back over a short window: what forward.cu and backward.cu, which this is put
// before, have in common.
//
// A warp has 16 queries, from t0 on, and sees a band of NB keys, from t0 - NI on, NI = NB - 16: column c of
// the band is key t0 - NI + c, and row r of it sees there the distance NI + r - c. Distances count from
// FIRST on: i = NI + r - c - FIRST is the row of the position keys P; i in [0, window) is seen.
//
// Products are mma.m16n8k16. Of 16 keys the first tile of 8 columns has keys 0 1 4 5 8 9 12 13, the second
// the others: so a thread (g = lane / 4, q = lane % 4) has keys 4q .. 4q + 3 of rows g and g + 8.
//
// instructions.cuh goes before this. NB, FIRST, DROPS and IS_BF16 or IS_F16 are defined when it is compiled.

#define NI (NB - 16)
#define ROW_BYTES 128  // of 64 numbers
#define LOG2E 1.4426950408889634f
#define EPS 1e-8f
#define INFINITE __int_as_float(0x7f800000)

// ---- numbers ----

__device__ __forceinline__ float low_of(u32 x) { return wide((u16)x); }
__device__ __forceinline__ float high_of(u32 x) {
#ifdef IS_BF16
    return __int_as_float(x & 0xffff0000u);
#else
    return wide((u16)(x >> 16));
#endif
}

#define HASH_FACTOR 0x7FEB352Du

__device__ __forceinline__ u32 mixed(u32 x) {
    x ^= x >> 16;
    x *= HASH_FACTOR;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}
// Whether dropout leaves key j: x is (row_key ^ j) times the first factor.
__device__ __forceinline__ bool is_kept(u32 x, u32 threshold) {
    x ^= x >> 15;
    return x * 0x846CA68Bu >= threshold;
}

// ---- tiles in shared memory ----

// Rows of 64 numbers lie in shared memory as 8 pieces of 16 bytes, in an order that depends on the row: so
// rows that are read together lie in different banks. These are 0 .. 7 or, if PERMUTED, 0 1 4 5 8 9 12 13.
template <bool PERMUTED>
__device__ __forceinline__ int swizzle(int row) {
    return PERMUTED ? (row & 1) | ((row >> 1) & 6) : row & 7;
}

// Where a lane reads the rows of a tile of 8 keys (the second tile is 2 rows on), and of 16 turned ones.
__device__ __forceinline__ u32 of_keys(u32 base) {
    const int lane = threadIdx.x & 31, n = lane & 7, row = 4 * (n >> 1) + (n & 1);
    return base + row * ROW_BYTES + (((lane >> 3) ^ n) << 4);
}
__device__ __forceinline__ u32 of_turned_keys(u32 base) {
    const int lane = threadIdx.x & 31, n = lane & 7, row = 4 * (n >> 1) + (n & 1) + 2 * ((lane >> 3) & 1);
    return base + row * ROW_BYTES + (((lane >> 4) ^ n) << 4);
}
// Scores of 16 keys, a tile of 8 after the other, added to what is there; tiles lie so many rows apart.
template <int APART = 2>
__device__ __forceinline__ void scores(float (&c)[2][4], const u32 (&a)[4][4], u32 at) {
    const u32 other = at ^ 64;
    u32 x[2][4], y[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) load4(x[n], at + n * APART * ROW_BYTES);
#pragma unroll
    for (int n = 0; n < 2; n++) load4(y[n], other + n * APART * ROW_BYTES);
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) product(c[n], a[k], x[n][2 * k], x[n][2 * k + 1]);
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int n = 0; n < 2; n++) product(c[n], a[2 + k], y[n][2 * k], y[n][2 * k + 1]);
}

// out[8] += a times 16 rows.
__device__ __forceinline__ void add_product(float (&out)[8][4], const u32 (&a)[4], u32 at) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        u32 x[4];
        load4_turned(x, at ^ (n << 5));
        product(out[2 * n], a, x[0], x[1]);
        product(out[2 * n + 1], a, x[2], x[3]);
    }
}

__device__ __forceinline__ float over_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
