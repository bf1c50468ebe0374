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

template <typename T, int V, bool LAST>
__device__ __forceinline__ void avg_pool_forward(const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx,
                                                 Strides sy) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int c = LAST ? at.inner * V : at.outer, p = LAST ? at.outer : at.middle, q = LAST ? at.middle : at.inner;
    Span row = rows(p, g), column = columns(q, g);
    float divisor = (float)max(row.size * column.size, 1);  // an empty window gives 0
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = x + n * sx.n + (i64)c * sx.c;
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0.0f;
        for (int h = row.begin; h < row.end; h++)
#pragma unroll 4
            for (int w = column.begin; w < column.end; w++) {
                Pack<T, V> value = load<T, V>(source + h * sx.h + w * sx.w);
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += to_float(value.v[v]);
            }
        Pack<T, V> result;
#pragma unroll
        for (int v = 0; v < V; v++) result.v[v] = from_float<T>(sum[v] / divisor);
        store<T, V>(y + n * sy.n + c * sy.c + p * sy.h + q * sy.w, result);
    }
}

// NCHW with large windows (global pooling): a warp per output, its lanes along the rows.
template <typename T>
__device__ __forceinline__ void avg_pool_forward_warp(const T* x, T* y, int N, Average g, Split split, u32 count,
                                                      Strides sx, Strides sy) {
    u32 i = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (i >= count) return;
    Place at = place(i, split);
    int c = at.outer, p = at.middle, q = at.inner;
    Span row = rows(p, g), column = columns(q, g);
    int width = column.end - column.begin, area = (row.end - row.begin) * width;
    float divisor = (float)max(row.size * column.size, 1);  // an empty window gives 0
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* source = x + n * sx.n + (i64)c * sx.c + row.begin * sx.h + column.begin * sx.w;
        float sum = 0.0f;
#pragma unroll 4
        for (int tap = lane; tap < area; tap += 32)
            sum += to_float(source[(tap / width) * sx.h + (tap % width) * sx.w]);
        sum = warp_sum(sum);
        if (lane == 0) y[n * sy.n + c * sy.c + p * sy.h + q * sy.w] = from_float<T>(sum / divisor);
    }
}

// mask (or null): the output of the ReLU that the layer below fused; dX is zero where mask <= 0.
template <typename T, int V, bool LAST>
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
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float sum[V];
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] = 0.0f;
        for (int p = p0; p <= p1; p++) {
            int height = rows(p, g).size;
            for (int q = q0; q <= q1; q++) {
                float divisor = (float)max(height * columns(q, g).size, 1);
                Pack<T, V> gradient = load<T, V>(dy + n * sy.n + c * sy.c + p * sy.h + q * sy.w);
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += to_float(gradient.v[v]) / divisor;
            }
        }
        i64 offset = n * sx.n + c * sx.c + h * sx.h + w * sx.w;
        Pack<T, V> result, gate;
        if (mask) gate = load<T, V>(mask + offset);
#pragma unroll
        for (int v = 0; v < V; v++)
            result.v[v] = from_float<T>(mask && to_float(gate.v[v]) <= 0.0f ? 0.0f : sum[v]);
        store<T, V>(dx + offset, result);
    }
}

// Entry points: <function>_<layout>_<type>.
#define AVG_POOL(T, V, LAYOUT, LAST, VARIANT)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_forward_##LAYOUT##_##VARIANT(                        \
        const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {                           \
        avg_pool_forward<T, V, LAST>(x, y, N, g, split, count, sx, sy);                                                 \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_backward_##LAYOUT##_##VARIANT(                       \
        const T* dy, const T* mask, T* dx, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {          \
        avg_pool_backward<T, V, LAST>(dy, mask, dx, N, g, split, count, sx, sy);                                        \
    }
AVG_POOL(float, 4, nhwc, true, f32x4)
AVG_POOL(float, 1, nhwc, true, f32)
AVG_POOL(bf16, 8, nhwc, true, bf16x8)
AVG_POOL(bf16, 1, nhwc, true, bf16)
AVG_POOL(float, 1, nchw, false, f32)
AVG_POOL(bf16, 1, nchw, false, bf16)

#define AVG_POOL_WARP(T, VARIANT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) avg_pool_forward_warp_##VARIANT(                              \
        const T* x, T* y, int N, Average g, Split split, u32 count, Strides sx, Strides sy) {                           \
        avg_pool_forward_warp<T>(x, y, N, g, split, count, sx, sy);                                                     \
    }
AVG_POOL_WARP(float, f32)
AVG_POOL_WARP(bf16, bf16)
