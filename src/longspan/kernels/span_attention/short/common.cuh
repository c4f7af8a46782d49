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
// NB, FIRST, DROPS and HALF ("bf16" or "f16") are defined when this is compiled.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define NI (NB - 16)
#define ROW_BYTES 128  // of 64 numbers
#define LOG2E 1.4426950408889634f
#define EPS 1e-8f
#define INFINITE __int_as_float(0x7f800000)

// ---- instructions ----

__device__ __forceinline__ u32 shared_at(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void *from, bool there) {
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void load4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void load4_turned(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 both(float low, float high) {
    u32 x;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;\n" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ __forceinline__ float wide(u16 x) {
    float y;
#ifdef IS_BF16
    y = __int_as_float((u32)x << 16);
#else
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
#endif
    return y;
}
__device__ __forceinline__ float low_of(u32 x) { return wide((u16)x); }
__device__ __forceinline__ float high_of(u32 x) {
#ifdef IS_BF16
    return __int_as_float(x & 0xffff0000u);
#else
    return wide((u16)(x >> 16));
#endif
}
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint4 shared128(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
__device__ __forceinline__ void to_shared32(u32 at, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
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
// Scores of 16 keys, a tile of 8 after the other, added to what is there.
__device__ __forceinline__ void scores(float (&c)[2][4], const u32 (&a)[4][4], u32 at) {
    const u32 other = at ^ 64;
    u32 x[2][4], y[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) load4(x[n], at + n * 2 * ROW_BYTES);
#pragma unroll
    for (int n = 0; n < 2; n++) load4(y[n], other + n * 2 * ROW_BYTES);
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
