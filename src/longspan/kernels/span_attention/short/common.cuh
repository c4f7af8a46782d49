// Attention of heads that look back over a short window: forward pass and gradients without tables.
//
// A warp has 16 queries, from t0 on, and sees a band of NB keys, from t0 - NI on, NI = NB - 16: column c of
// the band is key t0 - NI + c, and row r of it sees there the distance NI + r - c. Distances count from
// FIRST on: i = NI + r - c - FIRST is the row of the position keys P; i in [0, window) is seen.
// The term q . p_i is made for all i of a row and put into shared memory, from where it is read askew.
//
// Products are mma.m16n8k16. Of 16 keys the first tile of 8 columns has keys 0 1 4 5 8 9 12 13, the second
// the others: so a thread (g = lane / 4, q = lane % 4) has keys 4q .. 4q + 3 of rows g and g + 8.
//
// NB, FIRST, DROPS and HALF ("bf16" or "f16") are defined when this is compiled.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define NI (NB - 16)
#define WARPS 4
#define THREADS (32 * WARPS)
#define TILE (16 * WARPS)      // queries, or keys, of a program
#define ROWS (NB + TILE - 16)  // keys that its queries see
#define ROW_BYTES 128          // of 64 numbers
#define STRIDE (NI + 8)        // numbers of a row of distances in shared memory
#define WARP_DISTANCES ((16 * STRIDE * 2 < 32 * ROW_BYTES ? 32 * ROW_BYTES : 16 * STRIDE * 2) + 64)
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
__device__ __forceinline__ u32 turned(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
    return y;
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
__device__ __forceinline__ u16 shared16(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void to_shared16(u32 at, u16 x) {
    asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(at), "h"(x) : "memory");
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

__device__ __forceinline__ u32 mixed(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}
__device__ __forceinline__ bool is_kept(u32 row_key, int j, u32 threshold) {
    u32 x = (row_key ^ (u32)j) * 0x7FEB352Du;
    x ^= x >> 15;
    return x * 0x846CA68Bu >= threshold;
}

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

// Rows of 64 numbers lie in shared memory as 8 pieces of 16 bytes, in an order that depends on the row: so
// rows that are read together lie in different banks. These are 0 .. 7 or, if PERMUTED, 0 1 4 5 8 9 12 13.
template <bool PERMUTED>
__device__ __forceinline__ int swizzle(int row) {
    return PERMUTED ? (row & 1) | ((row >> 1) & 6) : row & 7;
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
        u32 x[2][4], y[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load4(x[n], at + n * 8 * ROW_BYTES);
            load4(y[n], (at ^ 64) + n * 8 * ROW_BYTES);
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < 2; n++) product(c[n], a[k], x[n][2 * k], x[n][2 * k + 1]);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < 2; n++) product(c[n], a[2 + k], y[n][2 * k], y[n][2 * k + 1]);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            to_shared32(to + n * 16, both(c[n][0], c[n][1]));
            to_shared32(to + n * 16 + 8 * STRIDE * 2, both(c[n][2], c[n][3]));
        }
    }
    __syncwarp();
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
// Of 16 rows that lie as they come.
__device__ __forceinline__ u32 of_turned_rows(u32 base) {
    const int lane = threadIdx.x & 31, n = lane & 7, row = n + 8 * ((lane >> 3) & 1);
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
__device__ __forceinline__ float most_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
