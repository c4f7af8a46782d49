// Instructions that CUDA has no words for: a function for each, and nothing else. Tests put functions of the
// same names in their place, so that the kernels run without a GPU.
//
// HALF ("bf16" or "f16") and IS_BF16 or IS_F16 are defined when this is compiled.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

// ---- numbers ----

__device__ __forceinline__ float wide(u16 x) {
    float y;
#ifdef IS_BF16
    y = __int_as_float((u32)x << 16);
#else
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(y) : "h"(x));
#endif
    return y;
}
__device__ __forceinline__ u32 both(float low, float high) {
    u32 x;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;\n" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float logarithm2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory ----

extern __shared__ __align__(128) unsigned char memory[];

__device__ __forceinline__ u32 shared_memory() { return (u32)__cvta_generic_to_shared(memory); }
__device__ __forceinline__ u16 shared16(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ u32 shared32(u32 at) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ uint4 shared128(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
__device__ __forceinline__ const u16 *shared_pointer(u32 at) {
    const u16 *p;
    asm volatile("ld.shared.u64 %0, [%1];\n" : "=l"(p) : "r"(at) : "memory");
    return p;
}
__device__ __forceinline__ void to_shared16(u32 at, u16 x) {
    asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(at), "h"(x) : "memory");
}
__device__ __forceinline__ void to_shared32(u32 at, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void to_shared_pointer(u32 at, const void *p) {
    asm volatile("st.shared.u64 [%0], %1;\n" ::"r"(at), "l"(p) : "memory");
}

// ---- global memory ----

__device__ __forceinline__ void to_global128(void *p, uint4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void fetch(const void *from) {
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from));
}

// ---- copies from global to shared memory ----

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

// ---- matrices ----

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
