// Average and adaptive average pooling, forward and backward.

// Average windows. Plain: the window at p * stride - pad, cut off at the padded input's end, divided by its size
// with or without padding. Adaptive: rows floor(p * H / P) up to ceil((p + 1) * H / P).
struct Average {
    int C, H, W, P, Q;
    int R, S, stride_h, stride_w, pad_h, pad_w;  // pad: above, left
    int end_h, end_w;                            // H + padding below, W + padding right
    int adaptive, include_pad;
    FastDiv by_H, by_W, by_P, by_Q, by_stride_h, by_stride_w;
};
struct Span {
    int begin, end, size;  // clipped to the input; size is what the divisor counts
};
__device__ __forceinline__ Span span(int p, int H, int R, int stride, int pad, int end, FastDiv by_P, const Average& g) {
    Span s;
    if (g.adaptive) {
        s.begin = (int)quotient((u32)(p * H), by_P);
        s.end = (int)quotient((u32)((p + 1) * H) + by_P.divisor - 1, by_P);
        s.size = s.end - s.begin;
        return s;
    }
    int begin = p * stride - pad, stop = min(begin + R, end);
    s.begin = max(begin, 0);
    s.end = min(stop, H);
    s.size = g.include_pad ? stop - begin : s.end - s.begin;
    return s;
}
__device__ __forceinline__ Span rows(int p, const Average& g) {
    return span(p, g.H, g.R, g.stride_h, g.pad_h, g.end_h, g.by_P, g);
}
__device__ __forceinline__ Span columns(int q, const Average& g) {
    return span(q, g.W, g.S, g.stride_w, g.pad_w, g.end_w, g.by_Q, g);
}

// K = 0: any window; otherwise a K x K window of stride ST, whose taps are all in flight at once where none is outside.
template <typename T, int V, bool LAST, int K, int ST>
__device__ __forceinline__ void avg_pool_forward(const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx,
                                                 Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, p = LAST ? at.outer : at.middle, q = LAST ? at.middle : at.inner;
    int top = p * ST - g.pad_h, left = q * ST - g.pad_w;
    bool inside = K && top >= 0 && left >= 0 && top + K <= g.H && left + K <= g.W;
    Span row = rows(p, g), column = columns(q, g);
    float share = 1.0f / (float)max(row.size * column.size, 1);  // an empty window gives 0
    int height = row.end - row.begin, width = column.end - column.begin;
    if (width == g.W) {  // whole rows lie behind each other
        width *= height;
        height = 1;
    }
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = x + n * sx.n + (i64)c * sx.c;
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0.0f;
        if (inside) {
            Pack<T, V> window[K ? K * K : 1];
#pragma unroll
            for (int t = 0; t < K * K; t++)
                window[t] = load<T, V>(source + (top + t / (K ? K : 1)) * sx.h + (left + t % (K ? K : 1)) * sx.w);
#pragma unroll
            for (int t = 0; t < K * K; t++)
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += to_float(window[t].v[v]);
        } else {
            source += row.begin * sx.h + column.begin * sx.w;
            for (int h = 0; h < height; h++)
#pragma unroll 8
                for (int w = 0; w < width; w++) {
                    Pack<T, V> value = load<T, V>(source + h * sx.h + w * sx.w);
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] += to_float(value.v[v]);
                }
        }
        Pack<T, V> result;
#pragma unroll
        for (int v = 0; v < V; v++) result.v[v] = from_float<T>(sum[v] * share);
        store<T, V>(y + n * sy.n + c * sy.c + p * sy.h + q * sy.w, result);
    }
}

// NCHW with large windows (global pooling): LANES lanes per output, side by side along the rows.
template <typename T, int LANES>
__device__ __forceinline__ void avg_pool_forward_lanes(const T* x, T* y, int N, Average g, Split split, u32 count,
                                                       Strides sx, Strides sy) {
    u32 i = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES;
    bool there = i < count;  // all lanes of a warp meet in the sum
    Place at = place(there ? i : 0, split);
    int c = at.outer, p = at.middle, q = at.inner;
    Span row = rows(p, g), column = columns(q, g);
    int width = column.end - column.begin, area = (row.end - row.begin) * width;
    bool whole = width == g.W;  // its rows lie behind each other: a tap is where it is counted
    float share = 1.0f / (float)max(row.size * column.size, 1);  // an empty window gives 0
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = x + n * sx.n + (i64)c * sx.c + row.begin * sx.h + column.begin * sx.w;
        float sum = 0.0f;
        for (int first = lane; first < area; first += 8 * LANES) {
            T taps[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {  // all in flight at once
                int tap = first + k * LANES;
                taps[k] = from_float<T>(0.0f);
                if (tap < area) taps[k] = source[whole ? tap : tap / width * sx.h + tap % width];
            }
#pragma unroll
            for (int k = 0; k < 8; k++) sum += to_float(taps[k]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (there && lane == 0) y[n * sy.n + c * sy.c + p * sy.h + q * sy.w] = from_float<T>(sum * share);
    }
}

// dX where the gradient that arrives is `sum`. mask (or null): the output of the ReLU that the layer below fused; dX is
// zero where mask <= 0.
template <typename T, int V>
__device__ __forceinline__ void store_gradient(const T* mask, T* dx, i64 offset, const float* sum) {
    Pack<T, V> result, gate;
    if (mask) gate = load<T, V>(mask + offset);
#pragma unroll
    for (int v = 0; v < V; v++) result.v[v] = from_float<T>(mask && to_float(gate.v[v]) <= 0.0f ? 0.0f : sum[v]);
    store<T, V>(dx + offset, result);
}

// K and ST as in forward, K a multiple of ST: then the same number of windows, all of one size, hold a pixel, but for
// those at the edge.
template <typename T, int V, bool LAST, int K, int ST>
__device__ __forceinline__ void avg_pool_backward(const T* dy, const T* mask, T* dx, int N, Average g, Split split,
                                                  u32 count, Strides sx, Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, h = LAST ? at.outer : at.middle, w = LAST ? at.middle : at.inner;
    int p0, p1, q0, q1;
    if (g.adaptive) {
        p0 = (int)quotient((u32)(h * g.P), g.by_H);
        p1 = (int)quotient((u32)((h + 1) * g.P) + g.by_H.divisor - 1, g.by_H) - 1;
        q0 = (int)quotient((u32)(w * g.Q), g.by_W);
        q1 = (int)quotient((u32)((w + 1) * g.Q) + g.by_W.divisor - 1, g.by_W) - 1;
    } else {
        int top = h + g.pad_h, left = w + g.pad_w;
        p0 = top < g.R ? 0 : (int)quotient((u32)(top - g.R + g.stride_h), g.by_stride_h);
        q0 = left < g.S ? 0 : (int)quotient((u32)(left - g.S + g.stride_w), g.by_stride_w);
        p1 = min((int)quotient((u32)top, g.by_stride_h), g.P - 1);
        q1 = min((int)quotient((u32)left, g.by_stride_w), g.Q - 1);
    }
    const int D = K ? K / ST : 1;
    int first_row = p0 * ST - g.pad_h, first_column = q0 * ST - g.pad_w;  // of the windows; the last ones end D - 1 later
    bool inside = K && p1 - p0 == D - 1 && q1 - q0 == D - 1 && first_row >= 0 && first_column >= 0 &&
                  first_row + (D - 1) * ST + K <= g.H && first_column + (D - 1) * ST + K <= g.W;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = dy + n * sy.n + (i64)c * sy.c + p0 * sy.h + q0 * sy.w;
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0.0f;
        if (inside) {
            Pack<T, V> windows[D * D];
#pragma unroll
            for (int t = 0; t < D * D; t++) windows[t] = load<T, V>(source + t / D * sy.h + t % D * sy.w);
#pragma unroll
            for (int v = 0; v < V; v++) {
#pragma unroll
                for (int t = 0; t < D * D; t++) sum[v] += to_float(windows[t].v[v]);
                sum[v] *= 1.0f / (K ? K * K : 1);
            }
        } else {
            for (int p = p0; p <= p1; p++) {
                int height = rows(p, g).size;
                for (int q = q0; q <= q1; q++) {
                    float share = 1.0f / (float)max(height * columns(q, g).size, 1);
                    Pack<T, V> gradient = load<T, V>(source + (p - p0) * sy.h + (q - q0) * sy.w);
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] += to_float(gradient.v[v]) * share;
                }
            }
        }
        store_gradient<T, V>(mask, dx, n * sx.n + (i64)c * sx.c + h * sx.h + w * sx.w, sum);
    }
}

// The values of one row that V results need: V channels of three pixels (NHWC), or V pixels and their neighbours (NCHW).
template <typename T, int V, bool LAST> struct Taps {
    static const int PARTS = LAST ? 3 : V + 2;  // pixels
    Pack<T, V> middle, sides[LAST ? 2 : 1];
    T ends[2];

    // source: the first of the V values; there: the row is in the image; left, right: the neighbour is.
    __device__ __forceinline__ void read(const T* source, int step, bool there, bool left, bool right) {
        if constexpr (LAST) {
            middle = sides[0] = sides[1] = {};
            if (there && left) sides[0] = load<T, V>(source - step);
            if (there && right) sides[1] = load<T, V>(source + step);
        } else {
            middle = {};
            ends[0] = ends[1] = from_float<T>(0.0f);
            if (there && left) ends[0] = source[-1];
            if (there && right) ends[1] = source[V];
        }
        if (there) middle = load<T, V>(source);
    }
    // Sums of three neighbours each, weighted by their pixels' parts.
    __device__ __forceinline__ void sum(const float* part, float* sums) const {
#pragma unroll
        for (int v = 0; v < V; v++) {
            if constexpr (LAST) {
                sums[v] = to_float(sides[0].v[v]) * part[0] + to_float(middle.v[v]) * part[1] +
                          to_float(sides[1].v[v]) * part[2];
            } else {
                sums[v] = to_float(v ? middle.v[v ? v - 1 : 0] : ends[0]) * part[v] + to_float(middle.v[v]) * part[v + 1] +
                          to_float(v < V - 1 ? middle.v[v < V - 1 ? v + 1 : 0] : ends[1]) * part[v + 2];
            }
        }
    }
};

// What the size of a 3 x 3 window counts in one direction.
__device__ __forceinline__ int window_size(int p, int extent, const Average& g) {
    return g.include_pad ? 3 : 3 - (p <= 0) - (p >= extent - 1);
}

// 3 x 3 windows of stride 1 with a padding of 1: the gradient is as large as the input and a sum of 3 x 3 of its
// neighbours too, so that both directions are one filter. forward: each sum is divided by its window's size; backward:
// each term by its own window's. A thread takes ROWS results below each other and reads each row once, two rows ahead.
// blockIdx.y is the strip of ROWS rows and blockIdx.z the image: what two strips read runs at nearly the same time.
template <typename T, int V, bool LAST, int ROWS>
__device__ __forceinline__ void avg_pool_box(const T* in, const T* mask, T* out, int N, Average g, Split split, u32 count,
                                             Strides si, Strides so, int backward) {
    const int PARTS = Taps<T, V, LAST>::PARTS, RESULTS = LAST ? 1 : V;  // pixels that are read, and that are written
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int group = at.outer * (int)split.inner.divisor;  // NHWC: of channels, so that a block's pixels are neighbours
    int c = LAST ? (group + at.inner) * V : at.middle, w = LAST ? at.middle : at.inner * V, h = blockIdx.y * ROWS;
    bool left = w > 0, right = w + RESULTS < g.W;
    float part[PARTS], interior[RESULTS];
#pragma unroll
    for (int s = 0; s < PARTS; s++) part[s] = backward ? 1.0f / (float)window_size(w + s - 1, g.W, g) : 1.0f;
#pragma unroll
    for (int s = 0; s < RESULTS; s++) interior[s] = backward ? 1.0f : 1.0f / (float)(3 * window_size(w + s, g.W, g));
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        const T* source = in + n * si.n + (i64)c * si.c + ((h - 1) * si.h + w * si.w);
        i64 target = n * so.n + (i64)c * so.c + (h * so.h + w * so.w);
        Taps<T, V, LAST> lines[2];
        float sums[3][V];  // of each row's pixels
#pragma unroll
        for (int l = 0; l < 2; l++) lines[l].read(source + l * si.h, si.w, h + l > 0 && h + l <= g.H, left, right);
#pragma unroll
        for (int l = 0; l < ROWS + 2; l++) {
            lines[l % 2].sum(part, sums[l % 3]);
            const int next = l + 2;
            if (next < ROWS + 2)
                lines[l % 2].read(source + next * si.h, si.w, h + next <= g.H, left, right);
            int rows = window_size(h + l - 1, g.H, g);
            if (backward) {
                float share = rows == 3 ? 1.0f / 3.0f : 1.0f / (float)rows;
#pragma unroll
                for (int v = 0; v < V; v++) sums[l % 3][v] *= share;
            }
            if (l < 2 || h + l - 2 >= g.H) continue;
            rows = window_size(h + l - 2, g.H, g);
            float result[V];
#pragma unroll
            for (int v = 0; v < V; v++) {
                float share = interior[LAST ? 0 : v];
                if (!backward && rows < 3) share = 1.0f / (float)(rows * window_size(w + (LAST ? 0 : v), g.W, g));
                result[v] = (sums[(l + 1) % 3][v] + sums[(l + 2) % 3][v] + sums[l % 3][v]) * share;
            }
            store_gradient<T, V>(mask, out, target + (l - 2) * so.h, result);
        }
    }
}

// One window that is the whole image: every pixel gets the same share of dY [N,C]. `inner` counts a pixel's packs of
// channels (NHWC) or a channel's pixels (NCHW), `outer` an image's pixels (NHWC).
template <typename T, int V, bool LAST>
__device__ __forceinline__ void avg_pool_backward_global(const T* dy, const T* mask, T* dx, u32 packs, FastDiv inner,
                                                         FastDiv outer, float share) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    float sum[V];
    if (LAST) {
        u32 pixel = quotient(i, inner), n = quotient(pixel, outer);
        Pack<T, V> gradient = load<T, V>(dy + ((i64)n * inner.divisor + (i - pixel * inner.divisor)) * V);
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = to_float(gradient.v[v]) * share;
    } else {
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = to_float(dy[quotient(i * V + v, inner)]) * share;
    }
    store_gradient<T, V>(mask, dx, (i64)i * V, sum);
}

// Entry points: <function>_<layout>_<type>[_<window>].
#define AVG_POOL(T, V, LAYOUT, LAST, VARIANT, K, ST)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_forward_##LAYOUT##_##VARIANT(                        \
        const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {                           \
        avg_pool_forward<T, V, LAST, K, ST>(x, y, N, g, split, count, sx, sy);                                          \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_backward_##LAYOUT##_##VARIANT(                       \
        const T* dy, const T* mask, T* dx, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {          \
        avg_pool_backward<T, V, LAST, K, ST>(dy, mask, dx, N, g, split, count, sx, sy);                                 \
    }
#define AVG_POOL_WINDOWS(T, V, LAYOUT, LAST, VARIANT)      \
    AVG_POOL(T, V, LAYOUT, LAST, VARIANT, 0, 1)            \
    AVG_POOL(T, V, LAYOUT, LAST, VARIANT##_k2s2, 2, 2)
AVG_POOL_WINDOWS(float, 4, nhwc, true, f32x4)
AVG_POOL_WINDOWS(float, 1, nhwc, true, f32)
AVG_POOL_WINDOWS(bf16, 8, nhwc, true, bf16x8)
AVG_POOL_WINDOWS(bf16, 1, nhwc, true, bf16)
AVG_POOL_WINDOWS(float, 1, nchw, false, f32)
AVG_POOL_WINDOWS(bf16, 1, nchw, false, bf16)

#define AVG_POOL_GLOBAL(T, V, LAYOUT, LAST, VARIANT)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_backward_global_##LAYOUT##_##VARIANT(                \
        const T* dy, const T* mask, T* dx, u32 packs, FastDiv inner, FastDiv outer, float share) {                      \
        avg_pool_backward_global<T, V, LAST>(dy, mask, dx, packs, inner, outer, share);                                 \
    }
AVG_POOL_GLOBAL(float, 4, nhwc, true, f32x4)
AVG_POOL_GLOBAL(float, 1, nhwc, true, f32)
AVG_POOL_GLOBAL(bf16, 8, nhwc, true, bf16x8)
AVG_POOL_GLOBAL(bf16, 1, nhwc, true, bf16)
AVG_POOL_GLOBAL(float, 4, nchw, false, f32x4)
AVG_POOL_GLOBAL(float, 1, nchw, false, f32)
AVG_POOL_GLOBAL(bf16, 8, nchw, false, bf16x8)
AVG_POOL_GLOBAL(bf16, 1, nchw, false, bf16)

#define AVG_POOL_LANES(T, VARIANT, LANES)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_forward_lanes_##VARIANT##_##LANES(                   \
        const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {                           \
        avg_pool_forward_lanes<T, LANES>(x, y, N, g, split, count, sx, sy);                                             \
    }
AVG_POOL_LANES(float, f32, 8)
AVG_POOL_LANES(float, f32, 32)
AVG_POOL_LANES(bf16, bf16, 8)
AVG_POOL_LANES(bf16, bf16, 32)

#define AVG_POOL_BOX(T, V, LAYOUT, LAST, VARIANT)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) avg_pool_box_##LAYOUT##_##VARIANT(                         \
        const T* in, const T* mask, T* out, int N, Average g, Split split, u32 count, Strides si, Strides so,           \
        int backward) {                                                                                                 \
        avg_pool_box<T, V, LAST, 4>(in, mask, out, N, g, split, count, si, so, backward);                               \
    }
AVG_POOL_BOX(float, 4, nhwc, true, f32x4)
AVG_POOL_BOX(float, 1, nhwc, true, f32)
AVG_POOL_BOX(bf16, 8, nhwc, true, bf16x8)
AVG_POOL_BOX(bf16, 1, nhwc, true, bf16)
AVG_POOL_BOX(float, 4, nchw, false, f32x4)
AVG_POOL_BOX(float, 1, nchw, false, f32)
AVG_POOL_BOX(bf16, 4, nchw, false, bf16x4)
AVG_POOL_BOX(bf16, 1, nchw, false, bf16)
