// Max-pooling of small windows in NCHW memory, whole planes at a time.
//
// Rows of odd lengths allow no accesses of several values, but planes lie directly behind each other: a run of them is
// one span of memory. A block moves it between memory and shared memory in words of 16 bytes, and pools in there. A span
// begins anywhere in its first word, of which the values before it belong to the block before, and likewise at its end.

#define PLANES_BYTES 24576  // as in pool_ops.py

// Words of 16 bytes that hold so many bytes, wherever in the first one they begin.
__device__ __forceinline__ int words_of(int bytes) { return (bytes + 30) / 16; }

// How far behind the beginning of its word a value lies.
template <typename T> __device__ __forceinline__ int lead_of(i64 offset) { return (int)(offset % (16 / sizeof(T))); }

// Moves `count` values from a word's beginning on into shared memory; `readable`: how many there are up to the array's
// end. A word is read whole where it ends inside the array. `thread`: who the caller is, of THREADS.
template <typename T>
__device__ __forceinline__ void fetch(const T* source, T* target, int count, i64 readable, int thread) {
    const int V = 16 / sizeof(T), FLIGHT = 3;
    const int words = (int)(readable < count + V - 1 ? readable : count + V - 1) / V;
    for (int first = thread; first < words; first += FLIGHT * THREADS) {
        Pack<T, V> flight[FLIGHT];  // all loads are issued before the first store
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (first + k * THREADS < words) flight[k] = load<T, V>(source + (first + k * THREADS) * V);
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (first + k * THREADS < words) store<T, V>(target + (first + k * THREADS) * V, flight[k]);
    }
    for (int i = words * V + thread; i < count; i += THREADS) target[i] = source[i];
}

// Moves values `begin` to `end` of shared memory to `target`; both begin with a word.
template <typename T> __device__ __forceinline__ void put(const T* source, T* target, int begin, int end) {
    const int V = 16 / sizeof(T);
    for (int i = threadIdx.x * V; i < end; i += THREADS * V) {
        if (i >= begin && i + V <= end)
            store<T, V>(target + i, load<T, V>(source + i));
        else
            for (int k = max(i, begin); k < min(i + V, end); k++) target[k] = source[k];
    }
}

// The run of planes that a block takes.
struct Run {
    i64 first;
    int count;
};
__device__ __forceinline__ Run run_of(int per_block, i64 planes) {
    i64 first = (i64)blockIdx.x * per_block, left = planes - first;
    return {first, left < per_block ? (int)left : per_block};
}

// A thread takes every THREADS-th window, rather than several side by side: lanes are then two values apart in shared
// memory, which half of its banks serve, and a warp's Y and index are whole sectors nevertheless.
template <typename T, int K, int ST>
__device__ __forceinline__ void max_pool_forward_planes(const T* x, T* y, i8* index, Pool g, Split split, int per_block,
                                                        i64 planes, int relu) {
    __shared__ uint4 memory[PLANES_BYTES / 16];
    T* shared = reinterpret_cast<T*>(memory);
    const Run run = run_of(per_block, planes);
    const int area = g.H * g.W, windows = g.P * g.Q;
    const Strides inside = {0, area, g.W, 1};
    const i64 begin = run.first * area, out = run.first * windows;
    const int lead = lead_of<T>(begin);
    fetch<T>(x + begin - lead, shared, lead + run.count * area, planes * area - begin + lead, threadIdx.x);
    __syncthreads();
    for (int i = (int)threadIdx.x - (int)(out % 32); i < run.count * windows; i += THREADS) {
        if (i < 0) continue;
        Place at = place(i, split);
        const int h = at.middle * ST - g.pad_h, w = at.inner * ST - g.pad_w;
        float best;
        int tap;
        search<T, 1, K>(shared + lead + at.outer * area, h, w, g, inside, is_inside<K>(h, w, g), &best, &tap);
        store_maximum<T, 1>(y, index, out + i, &best, &tap, relu);
    }
}

// Tiles as in pooling.cu, from shared memory to shared memory.
template <typename T, int K, int ST>
__device__ __forceinline__ void max_pool_backward_planes(const T* dy, const i8* index, T* dx, Pool g, Split split,
                                                         int per_block, i64 planes) {
    __shared__ uint4 memory[PLANES_BYTES / 16];
    const Run run = run_of(per_block, planes);
    const int area = g.H * g.W, windows = g.P * g.Q;
    const Strides inside = {0, area, g.W, 1}, outside = {0, windows, g.Q, 1};
    const i64 begin = run.first * area, out = run.first * windows;
    const int lead = lead_of<T>(begin), dy_lead = lead_of<T>(out), tap_lead = lead_of<i8>(out);
    const int dy_word = words_of(per_block * area * sizeof(T));
    T* shared = reinterpret_cast<T*>(memory);
    T* gradients = reinterpret_cast<T*>(memory + dy_word);
    i8* taps = reinterpret_cast<i8*>(memory + dy_word + words_of(per_block * windows * sizeof(T)));
    const int count = run.count * windows;
    const i64 readable = planes * windows - out;
    fetch<T>(dy + out - dy_lead, gradients, dy_lead + count, readable + dy_lead, threadIdx.x);
    // The last warps first: those that have no dY to wait for.
    fetch<i8>(index + out - tap_lead, taps, tap_lead + count, readable + tap_lead, threadIdx.x ^ (THREADS - 32));
    __syncthreads();
    const int tiles = run.count * (int)(split.inner.divisor * split.middle.divisor);
    for (int i = threadIdx.x; i < tiles; i += THREADS) {
        Place at = place(i, split);
        backward_tile<T, 1, K, ST>(gradients + dy_lead, taps + tap_lead, shared + lead, 0, at.outer, at.middle,
                                   at.inner, g, inside, outside);
    }
    __syncthreads();
    put<T>(shared, dx + begin - lead, lead, lead + run.count * area);
}

// Entry points: <function>_<type>_<window>.
#define MAX_POOL_PLANES(T, VARIANT, K, ST)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_forward_planes_##VARIANT(                            \
        const T* x, T* y, i8* index, Pool g, Split split, int per_block, i64 planes, int relu) {                        \
        max_pool_forward_planes<T, K, ST>(x, y, index, g, split, per_block, planes, relu);                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_planes_##VARIANT(                           \
        const T* dy, const i8* index, T* dx, Pool g, Split split, int per_block, i64 planes) {                          \
        max_pool_backward_planes<T, K, ST>(dy, index, dx, g, split, per_block, planes);                                 \
    }
MAX_POOL_PLANES(float, f32_k2s2, 2, 2)
MAX_POOL_PLANES(float, f32_k3s2, 3, 2)
MAX_POOL_PLANES(bf16, bf16_k2s2, 2, 2)
MAX_POOL_PLANES(bf16, bf16_k3s2, 3, 2)
