// Max-pooling, forward and backward; over large windows side by side see pooling_large.cu.

// K = 0: any window, stride and dilation; otherwise a K x K window of stride ST and dilation 1.
template <typename T, int V, bool LAST, int K, int ST>
__device__ __forceinline__ void max_pool_forward(const T* x, T* y, i8* index, int N, Pool g, Split split, u32 count,
                                                 Strides sx, Strides sy, int relu) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, p = LAST ? at.outer : at.middle, q = LAST ? at.middle : at.inner;
    int h = p * (K ? ST : g.stride_h) - g.pad_h, w = q * (K ? ST : g.stride_w) - g.pad_w;
    const bool inside = is_inside<K>(h, w, g);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float best[V];
        int tap[V];
        search<T, V, K>(x + n * sx.n + (i64)c * sx.c, h, w, g, sx, inside, best, tap);
        store_maximum<T, V>(y, index, n * sy.n + c * sy.c + p * sy.h + q * sy.w, best, tap, relu);
    }
}

// The maxima of V neighbouring 2 x 2 windows, and their taps.
template <typename T, int V>
__device__ __forceinline__ void search_pairs(const T* source, const Strides& sx, float* best, int* tap) {
    Pack<T, 2 * V> above = load<T, 2 * V>(source), below = load<T, 2 * V>(source + sx.h);
#pragma unroll
    for (int v = 0; v < V; v++) {
        T window[4] = {above.v[2 * v], above.v[2 * v + 1], below.v[2 * v], below.v[2 * v + 1]};
        best[v] = to_float(window[0]);
        tap[v] = 0;
#pragma unroll
        for (int t = 1; t < 4; t++) {
            Pack<T, 1> one;
            one.v[0] = window[t];
            consider<T, 1, true>(one, t, best + v, tap + v);
        }
    }
}

// NCHW, 2 x 2 windows of stride 2 without padding: V neighbouring windows per thread, two row accesses.
template <typename T, int V>
__device__ __forceinline__ void max_pool_forward_pairs(const T* x, T* y, i8* index, int N, Split split, u32 count,
                                                       Strides sx, Strides sy, int relu) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int q = at.inner * V, p = at.middle, c = at.outer;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float best[V];
        int tap[V];
        search_pairs<T, V>(x + n * sx.n + (i64)c * sx.c + 2 * p * sx.h + 2 * q, sx, best, tap);
        store_maximum<T, V>(y, index, n * sy.n + c * sy.c + p * sy.h + q, best, tap, relu);
    }
}

// One thread owns a tile of ST x ST input pixels.
template <typename T, int V, bool LAST, int K, int ST, typename SAVED>
__device__ __forceinline__ void max_pool_backward_tile(const T* dy, const SAVED* saved, T* dx, int N, Pool g,
                                                       Split split, u32 count, Strides sx, Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, tw = LAST ? at.middle : at.inner, th = LAST ? at.outer : at.middle;
    for (int n = blockIdx.y; n < N; n += gridDim.y)
        backward_tile<T, V, K, ST>(dy, saved, dx, n, c, th, tw, g, sx, sy);
}

template <typename T, int V>
__device__ __forceinline__ Pack<i8, V> taps_of_pairs(const i8* index, i64 offset, i64, const Strides&) {
    return load<i8, V>(index + offset);
}
template <typename T, int V>
__device__ __forceinline__ Pack<i8, V> taps_of_pairs(const T* x, i64, i64 corner, const Strides& sx) {
    float best[V];
    int at[V];
    search_pairs<T, V>(x + corner, sx, best, at);
    Pack<i8, V> taps;
#pragma unroll
    for (int v = 0; v < V; v++) taps.v[v] = (i8)at[v];
    return taps;
}

// NCHW, 2 x 2 windows of stride 2 that cover the input exactly.
template <typename T, int V, typename SAVED>
__device__ __forceinline__ void max_pool_backward_pairs(const T* dy, const SAVED* saved, T* dx, int N, Split split,
                                                        u32 count, Strides sx, Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int q = at.inner * V, p = at.middle, c = at.outer;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        i64 offset = n * sy.n + c * sy.c + p * sy.h + q, corner = n * sx.n + (i64)c * sx.c + 2 * p * sx.h + 2 * q;
        Pack<T, V> gradient = load<T, V>(dy + offset);
        Pack<i8, V> tap = taps_of_pairs<T, V>(saved, offset, corner, sx);
        Pack<T, 2 * V> above, below;
#pragma unroll
        for (int v = 0; v < V; v++) {
            T zero = from_float<T>(0.0f);
            above.v[2 * v] = tap.v[v] == 0 ? gradient.v[v] : zero;
            above.v[2 * v + 1] = tap.v[v] == 1 ? gradient.v[v] : zero;
            below.v[2 * v] = tap.v[v] == 2 ? gradient.v[v] : zero;
            below.v[2 * v + 1] = tap.v[v] == 3 ? gradient.v[v] : zero;
        }
        store<T, 2 * V>(dx + corner, above);
        store<T, 2 * V>(dx + corner + sx.h, below);
    }
}

struct Windows {
    int first, last;
};

// Along one axis, the windows that may reach a pixel of the padded image: they begin there or up to `reach` before it.
__device__ __forceinline__ Windows covering(int at, int reach, int stride, int count) {
    int earliest = at - reach;
    return {earliest <= 0 ? 0 : (earliest + stride - 1) / stride, min(at / stride, count - 1)};
}

// Any geometry: one thread per input pixel (and V channels) adds up the windows that chose it.
template <typename T, int V, bool LAST>
__device__ __forceinline__ void max_pool_backward(const T* dy, const i8* index, T* dx, int N, Pool g, Split split,
                                                  u32 count, Strides sx, Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, h = LAST ? at.outer : at.middle, w = LAST ? at.middle : at.inner;
    int top = h + g.pad_h, left = w + g.pad_w;
    const Windows rows = covering(top, (g.R - 1) * g.dilation_h, g.stride_h, g.P);
    const Windows columns = covering(left, (g.S - 1) * g.dilation_w, g.stride_w, g.Q);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0.0f;
        for (int p = rows.first; p <= rows.last; p++) {
            int r = top - p * g.stride_h;
            if (g.dilation_h > 1) {
                if (r % g.dilation_h) continue;
                r /= g.dilation_h;
            }
            for (int q = columns.first; q <= columns.last; q++) {
                int s = left - q * g.stride_w;
                if (g.dilation_w > 1) {
                    if (s % g.dilation_w) continue;
                    s /= g.dilation_w;
                }
                i64 offset = n * sy.n + c * sy.c + p * sy.h + q * sy.w;
                Pack<i8, V> tap = load<i8, V>(index + offset);
                Pack<T, V> gradient = load<T, V>(dy + offset);
#pragma unroll
                for (int v = 0; v < V; v++)
                    if (tap.v[v] == r * g.S + s) sum[v] += to_float(gradient.v[v]);
            }
        }
        Pack<T, V> result;
#pragma unroll
        for (int v = 0; v < V; v++) result.v[v] = from_float<T>(sum[v]);
        store<T, V>(dx + n * sx.n + c * sx.c + h * sx.h + w * sx.w, result);
    }
}

// Whether a tap of a window is the one that forward would have saved, where X and the maximum are `value` (or both are
// NaN): no tap before it is as large, or no tap behind it is NaN.
template <typename T>
__device__ __forceinline__ bool chosen(const T* source, float value, int r, int s, int h, int w, const Pool& g,
                                       const Strides& sx) {
    const bool nan = value != value;
    const int from = nan ? r : 0, to = nan ? g.R - 1 : r;
    for (int a = from; a <= to; a++) {
        int row = h + (a - r) * g.dilation_h;
        if (row < 0 || row >= g.H) continue;
        const int begin = nan && a == r ? s + 1 : 0, end = !nan && a == r ? s : g.S;
        for (int b = begin; b < end; b++) {
            int column = w + (b - s) * g.dilation_w;
            if (column < 0 || column >= g.W) continue;
            float other = to_float(source[row * sx.h + column * sx.w]);
            if (nan ? other != other : other == value) return false;
        }
    }
    return true;
}

// Without an index, from X and Y, any geometry: a pixel looks at the rest of a window only where it is as
// large as its maximum, and then no further than to one that comes first.
template <typename T, bool LAST>
__device__ __forceinline__ void max_pool_backward_again(const T* dy, const T* x, const T* y, T* dx, int N, Pool g,
                                                        Split split, u32 count, Strides sx, Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner : at.outer, h = LAST ? at.outer : at.middle, w = LAST ? at.middle : at.inner;
    int top = h + g.pad_h, left = w + g.pad_w;
    const Windows rows = covering(top, (g.R - 1) * g.dilation_h, g.stride_h, g.P);
    const Windows columns = covering(left, (g.S - 1) * g.dilation_w, g.stride_w, g.Q);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = x + n * sx.n + (i64)c * sx.c;
        const float value = to_float(source[h * sx.h + w * sx.w]);
        float sum = 0.0f;
        for (int p = rows.first; p <= rows.last; p++) {
            int r = top - p * g.stride_h;
            if (r % g.dilation_h) continue;
            r /= g.dilation_h;
            for (int q = columns.first; q <= columns.last; q++) {
                int s = left - q * g.stride_w;
                if (s % g.dilation_w) continue;
                s /= g.dilation_w;
                i64 offset = n * sy.n + (i64)c * sy.c + p * sy.h + q * sy.w;
                float maximum = to_float(y[offset]);
                bool largest = value == maximum || (value != value && maximum != maximum);
                if (largest && chosen<T>(source, value, r, s, h, w, g, sx)) sum += to_float(dy[offset]);
            }
        }
        dx[n * sx.n + c * sx.c + h * sx.h + w * sx.w] = from_float<T>(sum);
    }
}

// Entry points: <function>_<layout>_<type>[_<variant>].
#define MAX_POOL(T, V, LAYOUT, LAST, VARIANT, K, ST)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_forward_##LAYOUT##_##VARIANT(                        \
        const T* x, T* y, i8* index, int N, Pool g, Split split, u32 count, Strides sx, Strides sy, int relu) {         \
        max_pool_forward<T, V, LAST, K, ST>(x, y, index, N, g, split, count, sx, sy, relu);                             \
    }
MAX_POOL(float, 4, nhwc, true, f32x4_k2s2, 2, 2)
MAX_POOL(float, 4, nhwc, true, f32x4_k3s2, 3, 2)
MAX_POOL(float, 4, nhwc, true, f32x4, 0, 0)
MAX_POOL(float, 1, nhwc, true, f32, 0, 0)
MAX_POOL(bf16, 8, nhwc, true, bf16x8_k2s2, 2, 2)
MAX_POOL(bf16, 8, nhwc, true, bf16x8_k3s2, 3, 2)
MAX_POOL(bf16, 8, nhwc, true, bf16x8, 0, 0)
MAX_POOL(bf16, 1, nhwc, true, bf16, 0, 0)
MAX_POOL(float, 1, nchw, false, f32_k2s2, 2, 2)
MAX_POOL(float, 1, nchw, false, f32_k3s2, 3, 2)
MAX_POOL(float, 1, nchw, false, f32, 0, 0)
MAX_POOL(bf16, 1, nchw, false, bf16_k2s2, 2, 2)
MAX_POOL(bf16, 1, nchw, false, bf16_k3s2, 3, 2)
MAX_POOL(bf16, 1, nchw, false, bf16, 0, 0)

#define MAX_POOL_BACKWARD(T, V, LAYOUT, LAST, VARIANT)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_##LAYOUT##_##VARIANT(                       \
        const T* dy, const i8* index, T* dx, int N, Pool g, Split split, u32 count, Strides sx, Strides sy) {           \
        max_pool_backward<T, V, LAST>(dy, index, dx, N, g, split, count, sx, sy);                                       \
    }
MAX_POOL_BACKWARD(float, 4, nhwc, true, f32x4)
MAX_POOL_BACKWARD(float, 1, nhwc, true, f32)
MAX_POOL_BACKWARD(bf16, 8, nhwc, true, bf16x8)
MAX_POOL_BACKWARD(bf16, 1, nhwc, true, bf16)
MAX_POOL_BACKWARD(float, 1, nchw, false, f32)
MAX_POOL_BACKWARD(bf16, 1, nchw, false, bf16)

// SAVED: the index, or X where the name says `again`.
#define MAX_POOL_BACKWARD_PAIRS(T, V, SAVED, VARIANT)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_pairs_##VARIANT(                            \
        const T* dy, const SAVED* saved, T* dx, int N, Split split, u32 count, Strides sx, Strides sy) {                \
        max_pool_backward_pairs<T, V>(dy, saved, dx, N, split, count, sx, sy);                                          \
    }
#define MAX_POOL_PAIRS(T, V, VARIANT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_forward_pairs_##VARIANT(                             \
        const T* x, T* y, i8* index, int N, Split split, u32 count, Strides sx, Strides sy, int relu) {                 \
        max_pool_forward_pairs<T, V>(x, y, index, N, split, count, sx, sy, relu);                                       \
    }                                                                                                                   \
    MAX_POOL_BACKWARD_PAIRS(T, V, i8, VARIANT)                                                                          \
    MAX_POOL_BACKWARD_PAIRS(T, V, T, again_##VARIANT)
MAX_POOL_PAIRS(float, 4, f32x4)
MAX_POOL_PAIRS(float, 2, f32x2)
MAX_POOL_PAIRS(float, 1, f32)
MAX_POOL_PAIRS(bf16, 4, bf16x4)
MAX_POOL_PAIRS(bf16, 2, bf16x2)
MAX_POOL_PAIRS(bf16, 1, bf16)

#define MAX_POOL_TILE(T, V, LAST, SAVED, VARIANT, K, ST)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_tile_##VARIANT(                             \
        const T* dy, const SAVED* saved, T* dx, int N, Pool g, Split split, u32 count, Strides sx, Strides sy) {        \
        max_pool_backward_tile<T, V, LAST, K, ST>(dy, saved, dx, N, g, split, count, sx, sy);                           \
    }
#define MAX_POOL_TILES(T, V, LAYOUT, LAST, VARIANT, K, ST)                                                              \
    MAX_POOL_TILE(T, V, LAST, i8, LAYOUT##_##VARIANT, K, ST)                                                            \
    MAX_POOL_TILE(T, V, LAST, T, again_##LAYOUT##_##VARIANT, K, ST)
MAX_POOL_TILES(float, 4, nhwc, true, f32x4_k2s2, 2, 2)
MAX_POOL_TILES(float, 4, nhwc, true, f32x4_k3s2, 3, 2)
MAX_POOL_TILES(bf16, 8, nhwc, true, bf16x8_k2s2, 2, 2)
MAX_POOL_TILES(bf16, 8, nhwc, true, bf16x8_k3s2, 3, 2)
MAX_POOL_TILES(float, 1, nchw, false, f32_k2s2, 2, 2)
MAX_POOL_TILES(float, 1, nchw, false, f32_k3s2, 3, 2)
MAX_POOL_TILES(bf16, 1, nchw, false, bf16_k2s2, 2, 2)
MAX_POOL_TILES(bf16, 1, nchw, false, bf16_k3s2, 3, 2)

#define MAX_POOL_AGAIN(T, LAYOUT, LAST, VARIANT)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_again_##LAYOUT##_##VARIANT(                 \
        const T* dy, const T* x, const T* y, T* dx, int N, Pool g, Split split, u32 count, Strides sx, Strides sy) {    \
        max_pool_backward_again<T, LAST>(dy, x, y, dx, N, g, split, count, sx, sy);                                     \
    }
MAX_POOL_AGAIN(float, nchw, false, f32)
MAX_POOL_AGAIN(float, nhwc, true, f32)
MAX_POOL_AGAIN(bf16, nchw, false, bf16)
MAX_POOL_AGAIN(bf16, nhwc, true, bf16)
