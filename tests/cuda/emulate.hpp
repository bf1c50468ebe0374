// Runs a CUDA kernel on the CPU, so that kernels and the code that launches them are tested where there is no GPU.
//
// Every CUDA thread is a fiber. A barrier or shuffle yields until the threads that it waits for have arrived; blocks
// run one after another. Shared memory is static storage. It is slow and knows nothing of races between blocks.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index3 {
    unsigned x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From> static To bit_copy(From from) {
    To to{};
    std::memcpy(&to, &from, sizeof(from) < sizeof(to) ? sizeof(from) : sizeof(to));
    return to;
}
static inline float __uint_as_float(unsigned x) { return bit_copy<float>(x); }
static inline unsigned __float_as_uint(float x) { return bit_copy<unsigned>(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

struct Group {  // threads that wait for each other
    unsigned alive = 0, arrived = 0, generation = 0;
    void release() {
        arrived = 0;
        generation++;
    }
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    Index3 index;
    unsigned id;
    bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber* current;
static Group block_group;
static std::vector<Group> warps;
static std::vector<unsigned long long> lanes;
static std::function<void()> body;

static void await(Group& group) {
    unsigned generation = group.generation;
    if (++group.arrived == group.alive)
        group.release();
    else
        while (group.generation == generation) swapcontext(&current->context, &scheduler);
}
static void __syncthreads() { await(block_group); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
    unsigned id = current->id;
    lanes[id] = bit_copy<unsigned long long>(value);
    await(warps[id / 32]);
    T other = bit_copy<T>(lanes[id ^ (unsigned)mask]);
    await(warps[id / 32]);
    return other;
}

static void leave(Group& group) {
    group.alive--;
    if (group.arrived && group.arrived == group.alive) group.release();
}
static void fiber_main() {
    body();
    current->done = true;
    leave(block_group);
    leave(warps[current->id / 32]);
    swapcontext(&current->context, &scheduler);
}

static bool run_block(unsigned threads) {
    if (fibers.size() < threads) fibers.resize(threads);
    block_group = Group{threads, 0, 0};
    warps.assign((threads + 31) / 32, Group{});
    lanes.assign(warps.size() * 32, 0);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.id = i;
        fiber.index = Index3{i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        fiber.done = false;
        warps[i / 32].alive++;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
    }
    unsigned left = threads;
    for (unsigned idle = 0; left;) {
        unsigned generation = block_group.generation, before = left;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            current = &fibers[i];
            threadIdx = current->index;
            swapcontext(&scheduler, &current->context);
            if (current->done) left--;
        }
        idle = left == before && generation == block_group.generation ? idle + 1 : 0;
        if (idle > 1000) return false;  // threads wait at different barriers
    }
    return true;
}

template <class... A, std::size_t... I>
static void apply(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}
struct Entry {
    const char* name;
    std::function<void(void**)> call;
    std::vector<int> sizes;
};
template <class... A> static Entry entry(const char* name, void (*kernel)(A...)) {
    return {name, [kernel](void** a) { apply(kernel, a, std::index_sequence_for<A...>{}); }, {(int)sizeof(A)...}};
}
static std::vector<Entry>& entries();
static Entry* find_entry(const char* name) {
    for (Entry& e : entries())
        if (!std::strcmp(e.name, name)) return &e;
    return nullptr;
}

// Sizes of the kernel's parameters in bytes; -1: no such kernel.
extern "C" int emulated_parameters(const char* name, int* sizes) {
    Entry* e = find_entry(name);
    if (!e) return -1;
    for (std::size_t i = 0; i < e->sizes.size(); i++) sizes[i] = e->sizes[i];
    return (int)e->sizes.size();
}
// 0: ran; 1: deadlock in a block.
extern "C" int emulate(const char* name, const unsigned* grid, const unsigned* block, void** arguments) {
    Entry* e = find_entry(name);
    gridDim = Index3{grid[0], grid[1], grid[2]};
    blockDim = Index3{block[0], block[1], block[2]};
    body = [e, arguments] { e->call(arguments); };
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = Index3{x, y, z};
                if (!run_block(block[0] * block[1] * block[2])) return 1;
            }
    return 0;
}
