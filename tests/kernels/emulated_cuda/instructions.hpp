// The functions of instructions.cuh, in whose place this goes: what their instructions do, after the manual
// of PTX.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

// ---- halves of a number ----

#ifdef IS_BF16
static float wide(u16 x) { return __int_as_float((u32)x << 16); }
static u16 half(float x) {
    const u32 bits = __float_as_int(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
static float wide(u16 x) {
    const int exponent = x >> 10 & 31, digits = x & 1023;
    const float size = exponent == 31 ? (digits ? NAN : INFINITY)
                                      : std::ldexp(exponent ? 1024 + digits : digits, max(exponent, 1) - 25);
    return x >> 15 ? -size : size;
}
static u16 half(float x) {
    const float size = std::fabs(x);
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    const int exponent = size == 0 ? -14 : max(std::ilogb(size), -14);
    // Digits that round up to the next power of 2 make the exponent larger by one.
    return sign | ((int)std::nearbyint(std::ldexp(size, 10 - exponent)) + ((exponent + 14) << 10));
}
#endif
static u32 both(float low, float high) { return half(low) | (u32)half(high) << 16; }

// ---- numbers ----

static float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f : x; }
static float power2(float x) { return flushed(std::exp2(x)); }
static float inverse(float x) { return flushed(1 / flushed(x)); }
static float logarithm2(float x) { return std::log2(flushed(x)); }

// ---- shared memory ----

static u32 shared_memory() { return SHARED_BEGIN; }

template <class Number>
static Number from_shared(u32 at) {
    Number x;
    std::memcpy(&x, to_be_read(at, sizeof(x), current), sizeof(x));
    return x;
}
template <class Number>
static void to_shared(u32 at, Number x) {
    std::memcpy(to_be_written(at, sizeof(x)), &x, sizeof(x));
}
// Beyond a row's ends a kernel reads what other threads may be writing, and throws it away: were it used, it
// would show as NaN.
static u16 shared16(u32 at) {
    check_place(at, sizeof(u16));
    const u32 place = at - SHARED_BEGIN;
    return is_being_written(accesses[place / 2], current) ? 0xffff : *(u16 *)&memory[place];
}
static u32 shared32(u32 at) { return from_shared<u32>(at); }
static uint4 shared128(u32 at) { return from_shared<uint4>(at); }
static const u16 *shared_pointer(u32 at) { return from_shared<const u16 *>(at); }
static void to_shared16(u32 at, u16 x) { to_shared(at, x); }
static void to_shared32(u32 at, u32 x) { to_shared(at, x); }
static void to_shared_pointer(u32 at, const void *p) { to_shared(at, p); }

// ---- global memory ----

static void to_global128(void *p, uint4 x) { *(uint4 *)p = x; }
static void fetch(const void *) {}

// What is on its way is neither what was there before nor what will be.
static void copy16(u32 to, const void *from, bool there) {
    if ((std::size_t)from % 16) fail("copies from where no 16 bytes begin");
    std::memset(to_be_written(to, 16), 0xff, 16);
    Thread &thread = threads[current];
    thread.copies.push_back({to, there ? from : nullptr, thread.copy_groups});
}
static void copies_end() { threads[current].copy_groups++; }
template <int LEFT>
static void wait_copies() {
    Thread &thread = threads[current];
    std::vector<Copy> left;
    for (const Copy &copy : thread.copies) {
        if (copy.group >= thread.copy_groups - LEFT) {
            left.push_back(copy);
            continue;
        }
        unsigned char *to = to_be_written(copy.to, 16);
        if (copy.from) std::memcpy(to, copy.from, 16);
        else std::memset(to, 0, 16);
    }
    thread.copies = left;
}

// ---- matrices, of which a warp's lane (g = lane / 4, q = lane % 4) has columns 2q and 2q + 1 of row g ----

static void load_tiles(u32 (&r)[4], u32 at, bool turned) {
    struct {
        u32 at, *r;
    } own = {at, r};
    in_warp(turned ? "load4_turned" : "load4", own, [turned](auto lanes) {
        u16 tiles[4][8][8];
        const unsigned first = current / WARP_SIZE * WARP_SIZE;
        for (unsigned n = 0; n < WARP_SIZE; n++)
            std::memcpy(tiles[n / 8][n % 8], to_be_read(lanes[n]->at, 16, first + n), 16);
        for (unsigned n = 0; n < WARP_SIZE; n++)
            for (int tile = 0; tile < 4; tile++) {
                const int g = n / 4, c = n % 4 * 2;
                const auto &x = tiles[tile];
                lanes[n]->r[tile] = turned ? x[c][g] | x[c + 1][g] << 16 : x[g][c] | x[g][c + 1] << 16;
            }
    });
}
static void load4(u32 (&r)[4], u32 at) { load_tiles(r, at, false); }
static void load4_turned(u32 (&r)[4], u32 at) { load_tiles(r, at, true); }

static u32 turned(u32 x) {
    in_warp("turned", x, [](auto lanes) {
        u16 tile[8][8];
        for (unsigned n = 0; n < WARP_SIZE; n++) std::memcpy(&tile[n / 4][n % 4 * 2], lanes[n], 4);
        for (unsigned n = 0; n < WARP_SIZE; n++)
            *lanes[n] = tile[n % 4 * 2][n / 4] | tile[n % 4 * 2 + 1][n / 4] << 16;
    });
    return x;
}

// c += a b: 16 rows of 16 numbers times 16 of 8.
static void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct {
        float *c;
        const u32 *a;
        u32 b[2];
    } own = {c, a, {b0, b1}};
    in_warp("product", own, [](auto lanes) {
        float left[16][16], right[16][8];
        for (unsigned n = 0; n < WARP_SIZE; n++) {
            const int g = n / 4, q = n % 4;
            for (int half = 0; half < 2; half++) {
                for (int x = 0; x < 4; x++)
                    left[g + x % 2 * 8][2 * q + half + x / 2 * 8] = wide(lanes[n]->a[x] >> 16 * half);
                for (int x = 0; x < 2; x++)
                    right[2 * q + half + x * 8][g] = wide(lanes[n]->b[x] >> 16 * half);
            }
        }
        float sums[16][8] = {};
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                for (int column = 0; column < 8; column++)
                    sums[row][column] += left[row][k] * right[k][column];
        for (unsigned n = 0; n < WARP_SIZE; n++)
            for (int x = 0; x < 4; x++) lanes[n]->c[x] += sums[n / 4 + x / 2 * 8][n % 4 * 2 + x % 2];
    });
}
