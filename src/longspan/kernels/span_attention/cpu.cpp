// Span attention on a CPU: every head of every row of the batch is a task of its own.
//
// A query t of a task sees rows t to t + W - 1 of a band: keys of the memory and then of the block, zeros
// before the first. A table of scores for a chunk of queries is in *distance layout*, a column for every
// distance, oldest first, or in *key layout*, row j shifted by j, so that a column is a key. Softmax, mask
// and position keys use the first, products with keys and values the second.
//
// Every product is `multiply`: rows of single numbers times vectors, summed in registers. The right
// operand must have contiguous rows, so keys or values are transposed first.
//
// The arithmetic is that of eager.py. Sums over tasks are added up in the order of tasks, not of
// threads: results are the same in every run. Shapes: as in the package.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(__AVX2__) || !defined(__FMA__)
#error "plain torch is faster on a CPU without AVX2 and FMA"
#endif
#ifdef __FAST_MATH__
#error "fast math would remove the rounding in exponential"
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 8;  // 24 sums of the 32 registers
#else
constexpr int LANES = 8, ROWS = 4;  // 12 of 16
#endif
constexpr int CHUNK = 32;
constexpr float EPSILON = 1e-8f;
constexpr float LOWEST = -3e38f;

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Hashes __attribute__((vector_size(4 * LANES)));

Ints counted() {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}
const Ints LANE = counted();

Lanes &at(float *x) { return *reinterpret_cast<Lanes *>(x); }
const Lanes &at(const float *x) { return *reinterpret_cast<const Lanes *>(x); }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

float sum(Lanes x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

float largest(Lanes x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x for x <= 0: 2^n times a polynomial in what is left, at most log(2) / 2 (Cephes' coefficients).
Lanes exponential(Lanes x) {
    const Ints is_zero = x < -87.0f;
    const Lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 leaves a whole number
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // log(2) in two parts
    Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return is_zero ? Lanes{} : (Lanes)((Ints)y + (__builtin_convertvector(n, Ints) << 23));
}

uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// A matrix of single numbers, by rows or by columns, and its strides.
struct Left {
    const float *start;
    int64_t row, step;
};

// One of vectors.
template <typename Number>
struct Right {
    Number *start;
    int64_t row;
};

// c = a b, or c += a b, for ROWS rows and `wide` vectors of columns.
template <int wide>
void tile(Left a, Right<const float> b, Right<float> c, int64_t depth, bool onto) {
    Lanes sums[ROWS][wide];
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < wide; part++)
            sums[row][part] = onto ? at(c.start + row * c.row + part * LANES) : Lanes{};
    for (int64_t step = 0; step < depth; step++) {
        Lanes right[wide];
#pragma GCC unroll 3
        for (int part = 0; part < wide; part++) right[part] = at(b.start + step * b.row + part * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            const float left = a.start[row * a.row + step * a.step];
#pragma GCC unroll 3
            for (int part = 0; part < wide; part++) sums[row][part] += left * right[part];
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < wide; part++) at(c.start + row * c.row + part * LANES) = sums[row][part];
}

// The same for any number of columns in whole vectors.
void multiply(Left a, Right<const float> b, Right<float> c, int64_t columns, int64_t depth,
              bool onto = false) {
    for (int64_t left = columns / LANES, wide; left > 0; left -= wide) {
        wide = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        (wide == 1 ? tile<1> : wide == 2 ? tile<2> : tile<3>)(a, b, c, depth, onto);
        b.start += wide * LANES;
        c.start += wide * LANES;
    }
}

// Both counts are multiples of LANES. Squares of 2 x 2, then of 4 x 4 ... exchange off-diagonal corners.
void transpose(const float *from, int64_t rows, int64_t columns, Right<float> to) {
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t column = 0; column < columns; column += LANES) {
            Lanes x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = at(from + (row + i) * columns + column);
#pragma GCC unroll 4
            for (int size = 1; size < LANES; size *= 2) {
                const Ints is_right = (LANE & size) != 0;
                const Ints upper = is_right ? LANE - size + LANES : LANE;
                const Ints lower = is_right ? LANE + LANES : LANE + size;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    if (!(i & size)) {
                        const Lanes above = x[i], below = x[i + size];
                        x[i] = __builtin_shuffle(above, below, upper);
                        x[i + size] = __builtin_shuffle(above, below, lower);
                    }
            }
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) at(to.start + (column + i) * to.row + row) = x[i];
        }
}

// Memory that a thread uses for task after task.
class Buffer {
    float *memory = nullptr;
    int64_t size = 0;

  public:
    ~Buffer() { free(memory); }

    float *of(int64_t numbers) {
        if (numbers > size) {
            free(memory);
            size = round_up(numbers, 16);
            memory = static_cast<float *>(aligned_alloc(64, 4 * size));
            if (!memory) abort();
        }
        return memory;
    }

    float *zeros(int64_t numbers) { return static_cast<float *>(memset(of(numbers), 0, 4 * numbers)); }
};

struct Buffers {
    Buffer keys, values, transposed, position_keys, position_rows, mask;
    Buffer q, out, by_key, by_distance, used, weights;
    Buffer dq, dout, dkeys, dvalues, dscores;
};

}  // namespace

// A tensor whose last dimension is K contiguous numbers, and its other strides.
struct Rows {
    float *start;
    int64_t of_batch, of_head, of_row;

    float *at(int64_t b, int64_t h, int64_t t) const {
        return start + b * of_batch + h * of_head + t * of_row;
    }
};

// A head, and its rows of the memory.
struct Head {
    Rows keys, values, dkeys, dvalues;
    int64_t number, remembered, window;
    int64_t begins;  // windows of the heads before it, each in whole vectors
};

struct Call {
    int64_t batch, heads, block, width, first_distance, longest, threads, seed;
    float scale, dropout, ramp;
    Rows q, k, v, out, dq, dk, dv, dout;
    const Head *each;       // longest windows first: short ones then fill the gaps
    const int64_t *filled;  // rows of the memory that are filled, [B], or null
    // The mask [H, L], nearest first, or spans [B, H, T], or null; position keys [L, K], nearest first, or
    // null.
    const float *mask, *spans, *position_keys;
    float *dmask, *dspans, *dposition_keys;
    float *weights;                  // softmax, [B, T, W] of every head, oldest first, or null
    float *totals;                   // its sum after the mask, [B, H, T]
    float *task_dmask, *task_dkeys;  // [B, W] and [B, W, K] of every head, oldest first
};

namespace {

// The offset of a task in arrays that have an element for every head and distance.
int64_t place_of(const Call &call, const Head &head, int64_t b) {
    return head.begins * call.batch + b * round_up(head.window, LANES);
}

struct Task {
    const Call &call;
    Buffers &buffers;
    const Head &head;
    const int64_t b, h, T, K, W;
    const int64_t columns;   // of a table in distance layout
    const int64_t key_row;   // from row to row of one in key layout
    const int64_t diagonal;  // from the first distance of a query to that of the next, there
    const int64_t seen;      // keys that ROWS queries see between them, in whole vectors
    const int64_t band;      // those that all queries see
    const int64_t band_row;  // no power of two: rows would share places in the cache
    const int64_t place;

    Task(const Call &call, int64_t number, Buffers &buffers)
        : call(call),
          buffers(buffers),
          head(call.each[number / call.batch]),
          b(number % call.batch),
          h(head.number),
          T(call.block),
          K(call.width),
          W(head.window),
          columns(round_up(W, LANES)),
          key_row(columns + CHUNK + LANES),
          diagonal(key_row + 1),
          seen(round_up(W + ROWS - 1, LANES)),
          band(round_up(W + round_up(T, CHUNK) + LANES, LANES)),
          band_row(round_up(band, 64) + LANES),
          place(place_of(call, head, b)) {}

    void forward() const {
        float *const keys =
            transposed(gathered(head.keys, call.k, buffers.keys), band, band_row, buffers.transposed);
        const float *const values = gathered(head.values, call.v, buffers.values);
        const float *const mask = masked(0);
        const float *position_keys = nullptr;
        if (call.position_keys) {
            const float *const rows = positions(buffers.position_keys);
            position_keys = transposed(rows, columns, columns, buffers.position_rows);
        }
        float *const q = buffers.q.of(CHUNK * K), *const out = buffers.out.of(CHUNK * K);
        float *const by_key = buffers.by_key.of(CHUNK * key_row);
        float *const by_distance = buffers.by_distance.zeros(CHUNK * columns);
        float *const used = buffers.used.zeros(CHUNK * key_row);  // zeros outside the window
        float *const forgotten = buffers.weights.of(columns);
        for (int64_t t0 = 0; t0 < T; t0 += CHUNK) {
            const int64_t queries = T - t0 < CHUNK ? T - t0 : CHUNK;
            load(call.q, t0, q);
            for (int64_t i = 0; i < CHUNK * K; i += LANES) at(q + i) *= call.scale;
            for (int64_t j = 0; j < queries; j += ROWS) {
                const Left asking = {q + j * K, K, 1};
                multiply(asking, {keys + t0 + j, band_row}, {by_key + j * diagonal, key_row}, seen, K);
                if (position_keys)
                    multiply(asking, {position_keys, columns}, {by_distance + j * columns, columns}, columns,
                             K);
            }
            for (int64_t j = 0; j < queries; j++) {
                float *const a = call.weights ? weights(t0 + j) : forgotten;
                weigh(t0 + j, by_key + j * diagonal, by_distance + j * columns,
                      call.spans ? masked(t0 + j) : mask, a, used + j * diagonal);
            }
            for (int64_t j = 0; j < queries; j += ROWS)
                multiply({used + j * diagonal, key_row, 1}, {values + (t0 + j) * K, K}, {out + j * K, K}, K,
                         W + ROWS - 1);
            for (int64_t j = 0; j < queries; j++) store(out + j * K, 1 / total(t0 + j), call.out, t0 + j);
        }
    }

    // From the scores of a query to its weights: `a` of the softmax, `used` with the values.
    void weigh(int64_t t, const float *by_key, const float *by_distance, const float *mask, float *a,
               float *used) const {
        const int64_t seen = call.filled ? t + call.filled[b] + 1 - call.first_distance : W;
        const int64_t before_text = seen < W ? W - seen : 0;
        Lanes top = Lanes{} + LOWEST, sums = {}, totals = {};
        for (int64_t r = 0; r < columns; r += LANES) {
            const Lanes score = at(by_key + r) + at(by_distance + r);
            at(a + r) = inside(r, before_text) ? score : Lanes{} + LOWEST;
            top = at(a + r) > top ? at(a + r) : top;
        }
        const float highest = largest(top);
        for (int64_t r = 0; r < columns; r += LANES) {
            const Lanes e = exponential(at(a + r) - highest);
            at(a + r) = inside(r, before_text) ? e : Lanes{};
            sums += at(a + r);
        }
        const float share = 1 / sum(sums);
        for (int64_t r = 0; r < columns; r += LANES) {
            at(a + r) *= share;
            const Lanes weight = at(a + r) * at(mask + r);
            totals += weight;
            at(used + r) = call.dropout > 0 ? weight * kept(t, r) : weight;
        }
        total(t) = sum(totals) + epsilon();
    }

    void backward() const {
        const float *const keys = gathered(head.keys, call.k, buffers.keys);
        float *const values =
            transposed(gathered(head.values, call.v, buffers.values), band, band_row, buffers.transposed);
        const float *const mask = masked(0);
        const float *const position_keys = call.position_keys ? positions(buffers.position_keys) : nullptr;
        float *const q = buffers.q.of(CHUNK * K), *const dq = buffers.dq.of(CHUNK * K);
        float *const dout = buffers.dout.of(CHUNK * K);
        float *const dused = buffers.by_key.zeros(CHUNK * key_row);  // so that no NaN is multiplied by 0
        float *const used = buffers.used.zeros(CHUNK * key_row);
        float *const by_key = buffers.dscores.zeros(CHUNK * key_row);
        float *const by_distance = buffers.by_distance.of(CHUNK * columns);
        float *const dkeys = buffers.dkeys.zeros(band * K), *const dvalues = buffers.dvalues.zeros(band * K);
        float *const dmask = call.task_dmask + place, *const dposition_keys = call.task_dkeys + place * K;
        memset(dmask, 0, 4 * columns);
        if (position_keys) memset(dposition_keys, 0, 4 * columns * K);
        for (int64_t t0 = 0; t0 < T; t0 += CHUNK) {
            const int64_t queries = T - t0 < CHUNK ? T - t0 : CHUNK;
            load(call.q, t0, q);
            load(call.dout, t0, dout);
            for (int64_t i = 0; i < CHUNK * K; i += LANES) at(q + i) *= call.scale;
            for (int64_t i = 0; i < queries * K; i += LANES) at(dout + i) *= 1 / total(t0 + i / K);
            for (int64_t j = 0; j < queries; j += ROWS)
                multiply({dout + j * K, K, 1}, {values + t0 + j, band_row}, {dused + j * diagonal, key_row},
                         seen, K);
            for (int64_t j = 0; j < queries; j++)
                weigh_gradients(t0 + j, dused + j * diagonal, call.spans ? masked(t0 + j) : mask,
                                used + j * diagonal, by_key + j * diagonal, by_distance + j * columns, dmask);
            for (int64_t j = 0; j < queries; j += ROWS) {
                const Right<float> dasking = {dq + j * K, K};
                multiply({by_key + j * diagonal, key_row, 1}, {keys + (t0 + j) * K, K}, dasking, K,
                         W + ROWS - 1);
                if (position_keys)
                    multiply({by_distance + j * columns, columns, 1}, {position_keys, K}, dasking, K, W,
                             true);
            }
            for (int64_t j = 0; j < queries; j++) store(dq + j * K, call.scale, call.dq, t0 + j);
            // Some keys, and the queries that see them.
            for (int64_t i = 0; i < queries + W - 1; i += ROWS) {
                const int64_t from = i < W ? 0 : i - W + 1, end = i + ROWS < queries ? i + ROWS : queries;
                const int64_t corner = from * key_row + i, to = (t0 + i) * K;
                multiply({by_key + corner, 1, key_row}, {q + from * K, K}, {dkeys + to, K}, K, end - from,
                         true);
                multiply({used + corner, 1, key_row}, {dout + from * K, K}, {dvalues + to, K}, K, end - from,
                         true);
            }
            for (int64_t r = 0; r < columns && position_keys; r += ROWS)
                multiply({by_distance + r, 1, columns}, {q, K}, {dposition_keys + r * K, K}, K, queries,
                         true);
        }
        scatter(dkeys, head.dkeys, call.dk);
        scatter(dvalues, head.dvalues, call.dv);
    }

    // From the gradients of a query's used weights to those of its scores, in both layouts.
    void weigh_gradients(int64_t t, const float *dused, const float *mask, float *used, float *by_key,
                         float *by_distance, float *dmask) const {
        const float *const a = weights(t);
        Lanes sums = {}, dspan = {};
        for (int64_t r = 0; r < columns; r += LANES) {
            const Lanes weight = at(a + r) * at(mask + r);
            at(used + r) = call.dropout > 0 ? weight * kept(t, r) : weight;
            sums += at(used + r) * at(dused + r);
        }
        const float inner = sum(sums) / total(t);
        for (int64_t r = 0; r < columns; r += LANES) {
            const Lanes dkept = call.dropout > 0 ? at(dused + r) * kept(t, r) : at(dused + r);
            const Lanes dmasked = (dkept - inner) * at(a + r);
            at(dmask + r) += dmasked;
            if (call.spans) {
                const Lanes m = unclamped(t, r);  // at 0 and 1 it passes the gradient
                dspan += (m >= 0.0f) & (m <= 1.0f) ? dmasked : Lanes{};
            }
            // The subtracted term of the softmax gradient, <da, a>, reduces to the last term,
            // which is the only one outside the span.
            const Lanes dscore = dmasked * at(mask + r) - epsilon() * inner * at(a + r);
            at(by_key + r) = dscore;
            at(by_distance + r) = dscore;
        }
        if (call.spans) call.dspans[row(t)] = sum(dspan) / call.ramp;
    }

    int64_t row(int64_t t) const { return (b * call.heads + h) * T + t; }
    float *weights(int64_t t) const { return call.weights + place * T + t * columns; }
    float &total(int64_t t) const { return call.totals[row(t)]; }
    float epsilon() const { return call.mask || call.spans ? EPSILON : 0; }

    // Which of the distances from r on are in the window, and not before the text began.
    Ints inside(int64_t r, int64_t before_text) const {
        return (LANE + int32_t(r) >= int32_t(before_text)) & (LANE + int32_t(r) < int32_t(W));
    }

    // What dropout does to the weights of a query from distance r on: see kernels/hashing.py.
    Lanes kept(int64_t t, int64_t r) const {
        const uint32_t row_key = mixed(uint32_t(row(t)) ^ uint32_t(call.seed));
        Hashes x = ((Hashes)(int32_t(W - 1 - r) - LANE) ^ row_key) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        return x >= uint32_t(call.dropout * 4294967296.0) ? Lanes{} + 1 / (1 - call.dropout) : Lanes{};
    }

    // Keys or values of memory and block, [band, K].
    float *gathered(const Rows &before, const Rows &block, Buffer &into) const {
        float *const rows = into.of(band * K);
        for (int64_t i = 0; i < band; i++) {
            const int64_t t = i - (W - 1) - call.first_distance;
            float *const to = rows + i * K;
            if (t < -head.remembered || t >= T) memset(to, 0, 4 * K);
            else memcpy(to, t < 0 ? before.at(b, 0, head.remembered + t) : block.at(b, h, t), 4 * K);
        }
        return rows;
    }

    // The inverse, for their gradients: rows outside the band get none.
    void scatter(const float *rows, const Rows &before, const Rows &block) const {
        for (int64_t t = -head.remembered; t < T; t++) {
            const int64_t i = t + (W - 1) + call.first_distance;
            float *const to = t < 0 ? before.at(b, 0, head.remembered + t) : block.at(b, h, t);
            if (i < 0 || i >= W - 1 + T) memset(to, 0, 4 * K);
            else memcpy(to, rows + i * K, 4 * K);
        }
    }

    float *transposed(const float *rows, int64_t count, int64_t row, Buffer &into) const {
        float *const columns = into.of(K * row);
        transpose(rows, count, K, {columns, row});
        return columns;
    }

    // Oldest first, [columns, K].
    float *positions(Buffer &into) const {
        float *const rows = into.zeros(columns * K);
        for (int64_t r = 0; r < W; r++) memcpy(rows + r * K, call.position_keys + (W - 1 - r) * K, 4 * K);
        return rows;
    }

    // The soft mask of the head or, with spans of its own, of query t.
    const float *masked(int64_t t) const {
        float *const mask = buffers.mask.zeros(columns);
        for (int64_t r = 0; r < columns && call.spans; r += LANES) {
            const Lanes m = unclamped(t, r);
            at(mask + r) = m < 0.0f ? Lanes{} : m > 1.0f ? Lanes{} + 1 : m;
        }
        for (int64_t r = 0; r < W && !call.spans; r++)
            mask[r] = call.mask ? call.mask[h * call.longest + W - 1 - r] : 1;
        return mask;
    }

    // The soft mask of query t before it is clamped, from distance r on.
    Lanes unclamped(int64_t t, int64_t r) const {
        const Lanes steps = __builtin_convertvector(int32_t(W - 1 - r) - LANE, Lanes);
        return (call.spans[row(t)] - steps) / call.ramp + 1;
    }

    void load(const Rows &rows, int64_t t0, float *to) const {
        for (int64_t j = 0; j < CHUNK; j++)
            if (t0 + j < T) memcpy(to + j * K, rows.at(b, h, t0 + j), 4 * K);
            else memset(to + j * K, 0, 4 * K);
    }

    void store(const float *from, float times, const Rows &rows, int64_t t) const {
        float *const to = rows.at(b, h, t);
        for (int64_t k = 0; k < K; k += LANES) at(to + k) = at(from + k) * times;
    }
};

// The gradients of one distance: of every head's mask, and of the position key that all share.
void add_up(const Call &call, int64_t distance) {
    float *const dposition_key = call.dposition_keys + distance * call.width;
    if (call.position_keys) memset(dposition_key, 0, 4 * call.width);
    for (int64_t number = 0; number < call.heads; number++) {
        const Head &head = call.each[number];
        float dmask = 0;
        for (int64_t b = 0; b < call.batch && distance < head.window; b++) {
            const int64_t place = place_of(call, head, b) + head.window - 1 - distance;
            dmask += call.task_dmask[place];
            for (int64_t k = 0; k < call.width && call.position_keys; k += LANES)
                at(dposition_key + k) += at(call.task_dkeys + place * call.width + k);
        }
        if (call.mask) call.dmask[head.number * call.longest + distance] = dmask;
    }
}

template <void (Task::*pass)() const>
void run(const Call &call) {
#pragma omp parallel num_threads(call.threads)
    {
        Buffers buffers;
#pragma omp for schedule(dynamic)
        for (int64_t number = 0; number < call.heads * call.batch; number++)
            (Task(call, number, buffers).*pass)();
    }
}

}  // namespace

extern "C" void forward(const Call *call) { run<&Task::forward>(*call); }

extern "C" void backward(const Call *call) {
    run<&Task::backward>(*call);
#pragma omp parallel for num_threads(call->threads)
    for (int64_t distance = 0; distance < call->longest; distance++) add_up(*call, distance);
}
