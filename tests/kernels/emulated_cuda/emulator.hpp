// CUDA as far as the kernels for short windows use it, on a processor. It goes before a kernel's source.
//
// Threads of a program are fibers. One runs until it waits for others, at a barrier or at an instruction of a
// whole warp; then any thread goes on that can, drawn at random but the same at every launch.
//
// Shared memory is NaN where nobody wrote, or a copy is on its way: whoever computes with that gets NaN. The
// last accesses to it are noted. Two by different threads, one of them a write, with no barrier in between,
// are an error, in whatever order they came.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};

namespace {

using std::max;
using std::min;

constexpr unsigned WARP_SIZE = 32, MOST_THREADS = 256, MOST_WARPS = MOST_THREADS / WARP_SIZE;
constexpr unsigned SHARED_BEGIN = 1024;  // addresses of less belong to nobody, as on a GPU
constexpr std::size_t STACK_BYTES = 1 << 16;
constexpr unsigned SEVERAL = MOST_THREADS;  // instead of a thread: more than one of the same warp

struct Index {
    unsigned x, y, z;
} threadIdx, blockIdx, gridDim;

// ---- threads ----

// A copy to shared memory that is on its way; zeros if it is from nowhere.
struct Copy {
    unsigned to;
    const void *from;
    int group;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::vector<Copy> copies;
    int copy_groups;  // that are closed
    bool is_done;
};

// Where threads wait for each other.
struct Meeting {
    std::vector<unsigned> waiting;
    const char *kind;
    unsigned ordered_at;  // when it last was a barrier: what was done before comes before what is done after
};

Thread threads[MOST_THREADS];
unsigned num_threads, current, barriers, drawn;
std::vector<unsigned> ready;
Meeting block, warps[MOST_WARPS];
void *given_by[MOST_THREADS];
ucontext_t launcher;
std::string problem;

std::string described(const std::string &what) {
    const std::string x = std::to_string(blockIdx.x), y = std::to_string(blockIdx.y),
                      z = std::to_string(blockIdx.z);
    return "thread " + std::to_string(current) + " of program " + x + ", " + y + ", " + z + " " + what;
}
// The thread is never heard of again.
[[noreturn]] void fail(const std::string &what) {
    problem = described(what);
    setcontext(&launcher);
    std::abort();
}

// Leaves for any thread that can go on, or for the launcher if there is none.
void leave(ucontext_t &from) {
    ucontext_t *to = &launcher;
    if (!ready.empty()) {
        drawn = drawn * 1664525 + 1013904223;
        std::swap(ready[(drawn >> 8) % ready.size()], ready.back());
        threadIdx.x = current = ready.back();
        ready.pop_back();
        to = &threads[current].context;
    }
    swapcontext(&from, to);
}

// The last of `size` threads does what they do together.
template <class Together>
void meet(Meeting &meeting, unsigned size, const char *kind, Together together) {
    if (!meeting.waiting.empty() && std::strcmp(meeting.kind, kind))
        fail(std::string("at a ") + kind + ", but others at a " + meeting.kind);
    meeting.kind = kind;
    meeting.waiting.push_back(current);
    if (meeting.waiting.size() == size) {
        together();
        ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
        meeting.waiting.clear();
    }
    leave(threads[current].context);
}

// Every lane gives something, which the last of them sees, and may change, for all.
template <class Given, class Together>
void in_warp(const char *kind, Given &own, Together together) {
    given_by[current] = &own;
    const unsigned warp = current / WARP_SIZE;
    meet(warps[warp], WARP_SIZE, kind, [&] {
        Given *lanes[WARP_SIZE];
        for (unsigned lane = 0; lane < WARP_SIZE; lane++)
            lanes[lane] = (Given *)given_by[warp * WARP_SIZE + lane];
        together(lanes);
    });
}

void __syncwarp() {
    Meeting &warp = warps[current / WARP_SIZE];
    meet(warp, WARP_SIZE, "__syncwarp", [&] { warp.ordered_at = ++barriers; });
}
void __syncthreads() {
    meet(block, num_threads, "__syncthreads", [] { block.ordered_at = ++barriers; });
}

// ---- shared memory ----

struct Access {
    unsigned after;  // so many barriers
    unsigned thread;
};
// Of two bytes, the least that is read or written: who wrote them last, and of every warp who read them last.
struct Accesses {
    Access write, reads[MOST_WARPS];
};

std::vector<unsigned char> memory;
std::vector<Accesses> accesses;

// Whether a barrier of both threads, or that they are the same, sets an access before what is done now.
bool is_ordered(const Access &before, unsigned its_warp, unsigned thread) {
    const unsigned warp = thread / WARP_SIZE;
    return before.thread == thread || before.after < block.ordered_at ||
           (its_warp == warp && before.after < warps[warp].ordered_at);
}

bool is_being_written(const Accesses &before, unsigned thread) {
    return !is_ordered(before.write, before.write.thread / WARP_SIZE, thread);
}

void check_place(unsigned at, unsigned bytes) {
    if (at < SHARED_BEGIN || at + bytes > SHARED_BEGIN + memory.size()) fail("beyond shared memory");
    if (at % bytes) fail("askew in shared memory");
}

unsigned char *to_be_read(unsigned at, unsigned bytes, unsigned thread) {
    check_place(at, bytes);
    at -= SHARED_BEGIN;
    for (unsigned half = at / 2; half < (at + bytes) / 2; half++) {
        if (is_being_written(accesses[half], thread)) fail("reads what another thread just wrote");
        Access &read = accesses[half].reads[thread / WARP_SIZE];
        read = {barriers, is_ordered(read, thread / WARP_SIZE, thread) ? thread : SEVERAL};
    }
    return &memory[at];
}

unsigned char *to_be_written(unsigned at, unsigned bytes) {
    check_place(at, bytes);
    at -= SHARED_BEGIN;
    for (unsigned half = at / 2; half < (at + bytes) / 2; half++) {
        if (is_being_written(accesses[half], current)) fail("writes where another thread just wrote");
        for (unsigned warp = 0; warp < MOST_WARPS; warp++)
            if (!is_ordered(accesses[half].reads[warp], warp, current))
                fail("writes where another thread just read");
        accesses[half].write = {barriers, current};
    }
    return &memory[at];
}

// ---- what a thread can do alone or with its warp ----

template <class Number, class Bits>
Number of_bits(Bits bits) {
    static_assert(sizeof(Number) == sizeof(Bits));
    Number number;
    std::memcpy(&number, &bits, sizeof(Number));
    return number;
}
float __int_as_float(unsigned x) { return of_bits<float>(x); }
int __float_as_int(float x) { return of_bits<int>(x); }
float __saturatef(float x) { return x > 0 ? min(x, 1.0f) : 0.0f; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
float2 make_float2(float x, float y) { return {x, y}; }

float __shfl_sync(unsigned, float x, unsigned lane) {
    struct {
        float x, found;
        unsigned from;
    } own = {x, 0, lane % WARP_SIZE};
    in_warp("shuffle", own, [](auto lanes) {
        for (unsigned n = 0; n < WARP_SIZE; n++) lanes[n]->found = lanes[lanes[n]->from]->x;
    });
    return own.found;
}
float __shfl_xor_sync(unsigned, float x, unsigned turned) {
    return __shfl_sync(~0u, x, (current % WARP_SIZE) ^ turned);
}
bool __all_sync(unsigned, bool x) {
    in_warp("vote", x, [](auto lanes) {
        const bool all = std::all_of(lanes, lanes + WARP_SIZE, [](bool *x) { return *x; });
        for (unsigned n = 0; n < WARP_SIZE; n++) *lanes[n] = all;
    });
    return x;
}

// ---- a launch ----

void (*run_kernel)(void **arguments);
void **kernel_arguments;

void run_thread() {
    run_kernel(kernel_arguments);
    if (!threads[current].copies.empty()) fail("ends with copies on their way");
    threads[current].is_done = true;
    leave(threads[current].context);
}

void run_program() {
    std::fill(memory.begin(), memory.end(), 0xff);
    block = {{}, "", ++barriers};
    std::fill(warps, warps + MOST_WARPS, block);
    ready.clear();
    for (unsigned n = 0; n < num_threads; n++) {
        Thread &thread = threads[n];
        if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
        thread.copies.clear();
        thread.copy_groups = 0;
        thread.is_done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&thread.context, run_thread, 0);
        ready.push_back(n);
    }
    leave(launcher);
    for (current = 0; problem.empty() && current < num_threads; current++)
        if (!threads[current].is_done) problem = described("waits for others in vain");
}

// What went wrong, if anything did.
const char *launch(void (*kernel)(void **), Index grid, unsigned block_threads, unsigned shared_bytes,
                   void **arguments) {
    run_kernel = kernel;
    kernel_arguments = arguments;
    num_threads = block_threads;
    gridDim = grid;
    drawn = 1;
    problem.clear();
    memory.resize(shared_bytes);
    accesses.resize(shared_bytes / 2);
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                run_program();
                if (!problem.empty()) return problem.c_str();
            }
    return nullptr;
}

template <class... Parameters, std::size_t... N>
void call(void (*kernel)(Parameters...), void **arguments, std::index_sequence<N...>) {
    kernel(*(Parameters *)arguments[N]...);
}
template <class... Parameters>
void call(void (*kernel)(Parameters...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace

// The way in for a kernel of this name; `arguments` has the address of each.
#define EMULATED(KERNEL)                                                                           \
    extern "C" const char *emulate_##KERNEL(unsigned x, unsigned y, unsigned z, unsigned threads,  \
                                            unsigned shared_bytes, void **arguments) {             \
        return launch([](void **given) { call(KERNEL, given); }, {x, y, z}, threads, shared_bytes, \
                      arguments);                                                                  \
    }
