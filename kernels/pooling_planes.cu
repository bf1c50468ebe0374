// The gradient of max-pooling small windows in NCHW memory, whole planes at a time.
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

// Taps of a run's windows into shared memory: those that forward saved, or from X, which takes the room of dX.
template <typename T, int K, int ST>
__device__ __forceinline__ void fetch_taps(const i8* index, i8* taps, T*, const Run& run, i64 planes, const Pool& g,
                                           const Split&) {
    const int windows = g.P * g.Q, lead = lead_of<i8>(run.first * windows);
    const i64 begin = run.first * windows - lead;
    // The last warps first: those that have no dY to wait for.
    fetch<i8>(index + begin, taps - lead, lead + run.count * windows, planes * windows - begin,
              threadIdx.x ^ (THREADS - 32));
}
template <typename T, int K, int ST>
__device__ __forceinline__ void fetch_taps(const T* x, i8* taps, T* shared, const Run& run, i64 planes, const Pool& g,
                                           const Split& split) {
    const int area = g.H * g.W, lead = lead_of<T>(run.first * area);
    const i64 begin = run.first * area - lead;
    fetch<T>(x + begin, shared - lead, lead + run.count * area, planes * area - begin, threadIdx.x);
    __syncthreads();
    for (int i = threadIdx.x; i < run.count * g.P * g.Q; i += THREADS) {
        Place at = place(i, split);
        const int h = at.middle * ST - g.pad_h, w = at.inner * ST - g.pad_w;
        float best;
        int tap;
        search<T, 1, K>(shared + at.outer * area, h, w, g, {0, area, g.W, 1}, is_inside<K>(h, w, g), &best, &tap);
        taps[i] = (i8)tap;
    }
}

// Tiles as in pooling.cu, from shared memory to shared memory. `saved`: index or X; `split`: of tiles.
template <typename T, int K, int ST, typename SAVED>
__device__ __forceinline__ void max_pool_backward_planes(const T* dy, const SAVED* saved, T* dx, Pool g, Split split,
                                                         Split windows, int per_block, i64 planes) {
    __shared__ uint4 memory[PLANES_BYTES / 16];
    const Run run = run_of(per_block, planes);
    const int area = g.H * g.W, count = g.P * g.Q;
    const i64 begin = run.first * area, out = run.first * count;
    const int lead = lead_of<T>(begin), dy_lead = lead_of<T>(out);
    const int dy_word = words_of(per_block * area * sizeof(T));
    const int tap_word = dy_word + words_of(per_block * count * sizeof(T));
    T* shared = reinterpret_cast<T*>(memory) + lead;
    T* gradients = reinterpret_cast<T*>(memory + dy_word) + dy_lead;
    i8* taps = reinterpret_cast<i8*>(memory + tap_word) + lead_of<i8>(out);
    fetch<T>(dy + out - dy_lead, gradients - dy_lead, dy_lead + run.count * count, planes * count - out + dy_lead,
             threadIdx.x);
    fetch_taps<T, K, ST>(saved, taps, shared, run, planes, g, windows);
    __syncthreads();
    const int tiles = run.count * (int)(split.inner.divisor * split.middle.divisor);
    for (int i = threadIdx.x; i < tiles; i += THREADS) {
        Place at = place(i, split);
        backward_tile<T, 1, K, ST>(gradients, taps, shared, 0, at.outer, at.middle, at.inner, g, {0, area, g.W, 1},
                                   {0, count, g.Q, 1});
    }
    __syncthreads();
    put<T>(shared - lead, dx + begin - lead, lead, lead + run.count * area);
}

// Entry points: <function>_<type>_<window>, or <function>_again_<type>_<window> of those that go by X.
#define MAX_POOL_PLANES(T, SAVED, VARIANT, K, ST)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_planes_##VARIANT(                           \
        const T* dy, const SAVED* saved, T* dx, Pool g, Split split, Split windows, int per_block, i64 planes) {        \
        max_pool_backward_planes<T, K, ST>(dy, saved, dx, g, split, windows, per_block, planes);                        \
    }
MAX_POOL_PLANES(float, i8, f32_k2s2, 2, 2)
MAX_POOL_PLANES(float, i8, f32_k3s2, 3, 2)
MAX_POOL_PLANES(bf16, i8, bf16_k2s2, 2, 2)
MAX_POOL_PLANES(bf16, i8, bf16_k3s2, 3, 2)
MAX_POOL_PLANES(float, float, again_f32_k2s2, 2, 2)
MAX_POOL_PLANES(float, float, again_f32_k3s2, 3, 2)
MAX_POOL_PLANES(bf16, bf16, again_bf16_k2s2, 2, 2)
MAX_POOL_PLANES(bf16, bf16, again_bf16_k3s2, 3, 2)
