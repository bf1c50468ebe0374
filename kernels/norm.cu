// Local response normalization, and the element-wise half of batch-norm (its sums are in reduction.cu).

#define LRN_CHANNELS 32
#define LRN_PIXELS 64
#define LRN_MOST 32  // widest window - 1

// A tile of LRN_CHANNELS x LRN_PIXELS values and the `size - 1` channels around it lies in shared memory; lanes run
// along the memory order. A thread owns 8 values of the tile and keeps in registers what it needs of them again.
struct Lrn {
    int C, pixels, size;
    float alpha_over_size, beta, k;
};
#define LRN_OWN (LRN_CHANNELS * LRN_PIXELS / THREADS)
#define LRN_PITCH (LRN_PIXELS + 1)

template <bool LAST> __device__ __forceinline__ void own(int u, int& c, int& p) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    c = LAST ? lane : warp + (u / 2) * 8;
    p = LAST ? warp + u * 8 : lane + (u % 2) * 32;
}
template <bool LAST> __device__ __forceinline__ i64 lrn_offset(int c, int p, const Lrn& g) {
    return LAST ? (i64)p * g.C + c : (i64)c * g.pixels + p;
}
__device__ __forceinline__ float power(float x, float exponent) { return exp2f(exponent * near_log2(x)); }

// scale = k + alpha / size * sum of x^2 over channels c - size / 2 .. c + (size - 1) / 2;  y = x * scale^-beta
template <typename T, bool LAST>
__device__ __forceinline__ void lrn_forward(const T* x, T* y, float* scale, int N, Lrn g) {
    __shared__ float tile[(LRN_CHANNELS + LRN_MOST) * LRN_PITCH];
    int c0 = blockIdx.y * LRN_CHANNELS, p0 = blockIdx.x * LRN_PIXELS, before = g.size / 2;
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        i64 image = (i64)n * g.C * g.pixels;
        float mine[LRN_OWN];
#pragma unroll
        for (int u = 0; u < LRN_OWN; u++) {
            int c, p;
            own<LAST>(u, c, p);
            bool inside = c0 + c < g.C && p0 + p < g.pixels;
            mine[u] = inside ? to_float(x[image + lrn_offset<LAST>(c0 + c, p0 + p, g)]) : 0.0f;
            tile[(c + before) * LRN_PITCH + p] = mine[u];
        }
        for (int i = threadIdx.x; i < (g.size - 1) * LRN_PIXELS; i += THREADS) {
            int p = LAST ? i / (g.size - 1) : i % LRN_PIXELS, c = LAST ? i % (g.size - 1) : i / LRN_PIXELS;
            c = c < before ? c - before : c - before + LRN_CHANNELS;
            bool inside = c0 + c >= 0 && c0 + c < g.C && p0 + p < g.pixels;
            tile[(c + before) * LRN_PITCH + p] = inside ? to_float(x[image + lrn_offset<LAST>(c0 + c, p0 + p, g)]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < LRN_OWN; u++) {
            int c, p;
            own<LAST>(u, c, p);
            float sum = 0.0f;
            for (int j = 0; j < g.size; j++) {
                float value = tile[(c + j) * LRN_PITCH + p];
                sum += value * value;
            }
            if (c0 + c >= g.C || p0 + p >= g.pixels) continue;
            float s = g.k + g.alpha_over_size * sum;
            i64 at = image + lrn_offset<LAST>(c0 + c, p0 + p, g);
            scale[at] = s;
            y[at] = from_float<T>(mine[u] * power(s, -g.beta));
        }
        __syncthreads();
    }
}

// dx = dy * scale^-beta - 2 * alpha * beta / size * x * sum of dy * y / scale over the channels whose window holds c
template <typename T, bool LAST>
__device__ __forceinline__ void lrn_backward(const T* x, const T* y, const float* scale, const T* dy, T* dx, int N, Lrn g) {
    __shared__ float tile[(LRN_CHANNELS + LRN_MOST) * LRN_PITCH];
    int c0 = blockIdx.y * LRN_CHANNELS, p0 = blockIdx.x * LRN_PIXELS, before = (g.size - 1) / 2;
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        i64 image = (i64)n * g.C * g.pixels;
        float value[LRN_OWN], direct[LRN_OWN];
#pragma unroll
        for (int u = 0; u < LRN_OWN; u++) {
            int c, p;
            own<LAST>(u, c, p);
            bool inside = c0 + c < g.C && p0 + p < g.pixels;
            i64 at = image + lrn_offset<LAST>(c0 + c, p0 + p, g);
            float s = inside ? scale[at] : 1.0f, gradient = inside ? to_float(dy[at]) : 0.0f;
            float output = inside ? to_float(y[at]) : 0.0f;
            value[u] = inside ? to_float(x[at]) : 0.0f;
            direct[u] = gradient * power(s, -g.beta);
            tile[(c + before) * LRN_PITCH + p] = gradient * output * near_reciprocal(s);
        }
        for (int i = threadIdx.x; i < (g.size - 1) * LRN_PIXELS; i += THREADS) {
            int p = LAST ? i / (g.size - 1) : i % LRN_PIXELS, c = LAST ? i % (g.size - 1) : i / LRN_PIXELS;
            c = c < before ? c - before : c - before + LRN_CHANNELS;
            bool inside = c0 + c >= 0 && c0 + c < g.C && p0 + p < g.pixels;
            i64 at = image + lrn_offset<LAST>(c0 + c, p0 + p, g);
            tile[(c + before) * LRN_PITCH + p] =
                inside ? to_float(dy[at]) * to_float(y[at]) * near_reciprocal(scale[at]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < LRN_OWN; u++) {
            int c, p;
            own<LAST>(u, c, p);
            float sum = 0.0f;
            for (int j = 0; j < g.size; j++) sum += tile[(c + j) * LRN_PITCH + p];
            if (c0 + c >= g.C || p0 + p >= g.pixels) continue;
            dx[image + lrn_offset<LAST>(c0 + c, p0 + p, g)] =
                from_float<T>(direct[u] - 2.0f * g.alpha_over_size * g.beta * value[u] * sum);
        }
        __syncthreads();
    }
}

#define LRN(T, LAYOUT, LAST, VARIANT)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        lrn_forward_##LAYOUT##_##VARIANT(const T* x, T* y, float* scale, int N, Lrn g) {                                    \
        lrn_forward<T, LAST>(x, y, scale, N, g);                                                                     \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) lrn_backward_##LAYOUT##_##VARIANT(                            \
        const T* x, const T* y, const float* scale, const T* dy, T* dx, int N, Lrn g) {                                     \
        lrn_backward<T, LAST>(x, y, scale, dy, dx, N, g);                                                            \
    }
LRN(float, nhwc, true, f32)
LRN(float, nchw, false, f32)
LRN(bf16, nhwc, true, bf16)
LRN(bf16, nchw, false, bf16)

// The usual window of 5 channels, NHWC: a thread takes V neighbours and the two channels on either side of them.
#define LRN_REACH 2

template <typename T, int V> struct Neighbours {
    Pack<T, V> own;
    Pack<T, LRN_REACH> left, right;
    __device__ __forceinline__ Neighbours(const T* x, i64 at, bool first, bool last) {
        own = load<T, V>(x + at);
#pragma unroll
        for (int v = 0; v < LRN_REACH; v++) left.v[v] = right.v[v] = from_float<T>(0.0f);
        if (!first) left = load<T, LRN_REACH>(x + at - LRN_REACH);
        if (!last) right = load<T, LRN_REACH>(x + at + V);
    }
    __device__ __forceinline__ float operator[](int v) const {  // -2 .. V + 1
        return to_float(v < 0 ? left.v[v + LRN_REACH] : v < V ? own.v[v] : right.v[v - V]);
    }
};

template <typename T, int V>
__device__ __forceinline__ void lrn5_forward(const T* x, T* y, float* scale, u32 packs, FastDiv channel_packs, Lrn g) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    u32 c = i - quotient(i, channel_packs) * channel_packs.divisor;
    i64 at = (i64)i * V;
    Neighbours<T, V> values(x, at, c == 0, c + 1 == channel_packs.divisor);
    Pack<float, V> scales;
    Pack<T, V> result;
#pragma unroll
    for (int v = 0; v < V; v++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = v - LRN_REACH; j <= v + LRN_REACH; j++) sum += values[j] * values[j];
        scales.v[v] = g.k + g.alpha_over_size * sum;
        result.v[v] = from_float<T>(values[v] * power(scales.v[v], -g.beta));
    }
    store<float, V>(scale + at, scales);
    store<T, V>(y + at, result);
}

template <typename T, int V>
__device__ __forceinline__ void lrn5_backward(const T* x, const T* y, const float* scale, const T* dy, T* dx, u32 packs,
                                              FastDiv channel_packs, Lrn g) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    u32 c = i - quotient(i, channel_packs) * channel_packs.divisor;
    bool first = c == 0, last = c + 1 == channel_packs.divisor;
    i64 at = (i64)i * V;
    Neighbours<T, V> outputs(y, at, first, last), gradients(dy, at, first, last);
    Neighbours<float, V> scales(scale, at, first, last);
    Pack<T, V> values = load<T, V>(x + at);
    float terms[V + 2 * LRN_REACH];
#pragma unroll
    for (int v = -LRN_REACH; v < V + LRN_REACH; v++) {
        bool outside = (first && v < 0) || (last && v >= V);  // there is no scale
        terms[v + LRN_REACH] = outside ? 0.0f : gradients[v] * outputs[v] * near_reciprocal(scales[v]);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j <= 2 * LRN_REACH; j++) sum += terms[v + j];
        float direct = gradients[v] * power(scales[v], -g.beta);
        values.v[v] = from_float<T>(direct - 2.0f * g.alpha_over_size * g.beta * to_float(values.v[v]) * sum);
    }
    store<T, V>(dx + at, values);
}
#define LRN5(T, V, VARIANT)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) lrn5_forward_nhwc_##VARIANT(                                  \
        const T* x, T* y, float* scale, u32 packs, FastDiv channel_packs, Lrn g) {                                      \
        lrn5_forward<T, V>(x, y, scale, packs, channel_packs, g);                                                       \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) lrn5_backward_nhwc_##VARIANT(                                 \
        const T* x, const T* y, const float* scale, const T* dy, T* dx, u32 packs, FastDiv channel_packs, Lrn g) {      \
        lrn5_backward<T, V>(x, y, scale, dy, dx, packs, channel_packs, g);                                              \
    }
LRN5(float, 4, f32x4)
LRN5(bf16, 8, bf16x8)

// The same window, NCHW: a thread takes LRN_RUN channels of a pixel and the two on either side of them, all loads at once;
// lanes take neighbouring pixels. Thread i of an image (blockIdx.y): pixel i % pixels of the run i / pixels.
#define LRN_RUN 8

template <typename T>
__device__ __forceinline__ void lrn5_forward_runs(const T* x, T* y, float* scale, int N, u32 count, FastDiv pixels, Lrn g) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    u32 run = quotient(i, pixels);
    int c0 = (int)run * LRN_RUN, p = (int)(i - run * pixels.divisor);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        i64 at = (i64)n * g.C * g.pixels + (i64)c0 * g.pixels + p;
        float values[LRN_RUN + 2 * LRN_REACH];
#pragma unroll
        for (int j = 0; j < LRN_RUN + 2 * LRN_REACH; j++) {
            int c = c0 + j - LRN_REACH;
            values[j] = c >= 0 && c < g.C ? to_float(x[at + (j - LRN_REACH) * (i64)g.pixels]) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < LRN_RUN; k++, at += g.pixels) {
            if (c0 + k >= g.C) break;
            float sum = 0.0f;
#pragma unroll
            for (int j = k; j <= k + 2 * LRN_REACH; j++) sum += values[j] * values[j];
            float s = g.k + g.alpha_over_size * sum;
            scale[at] = s;
            y[at] = from_float<T>(values[k + LRN_REACH] * power(s, -g.beta));
        }
    }
}

template <typename T>
__device__ __forceinline__ void lrn5_backward_runs(const T* x, const T* y, const float* scale, const T* dy, T* dx, int N,
                                                   u32 count, FastDiv pixels, Lrn g) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    u32 run = quotient(i, pixels);
    int c0 = (int)run * LRN_RUN, p = (int)(i - run * pixels.divisor);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        i64 at = (i64)n * g.C * g.pixels + (i64)c0 * g.pixels + p;
        float terms[LRN_RUN + 2 * LRN_REACH], direct[LRN_RUN], values[LRN_RUN];
#pragma unroll
        for (int j = 0; j < LRN_RUN + 2 * LRN_REACH; j++) {
            int c = c0 + j - LRN_REACH, k = j - LRN_REACH;
            bool inside = c >= 0 && c < g.C;
            i64 from = at + k * (i64)g.pixels;
            float gradient = inside ? to_float(dy[from]) : 0.0f, s = inside ? scale[from] : 1.0f;
            terms[j] = inside ? gradient * to_float(y[from]) * near_reciprocal(s) : 0.0f;
            if (k < 0 || k >= LRN_RUN) continue;
            direct[k] = gradient * power(s, -g.beta);
            values[k] = inside ? to_float(x[from]) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < LRN_RUN; k++, at += g.pixels) {
            if (c0 + k >= g.C) break;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j <= 2 * LRN_REACH; j++) sum += terms[k + j];
            dx[at] = from_float<T>(direct[k] - 2.0f * g.alpha_over_size * g.beta * values[k] * sum);
        }
    }
}
#define LRN5_RUNS(T, VARIANT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) lrn5_forward_nchw_##VARIANT(                                  \
        const T* x, T* y, float* scale, int N, u32 count, FastDiv pixels, Lrn g) {                                      \
        lrn5_forward_runs<T>(x, y, scale, N, count, pixels, g);                                                         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) lrn5_backward_nchw_##VARIANT(                                 \
        const T* x, const T* y, const float* scale, const T* dy, T* dx, int N, u32 count, FastDiv pixels, Lrn g) {      \
        lrn5_backward_runs<T>(x, y, scale, dy, dx, N, count, pixels, g);                                                \
    }
LRN5_RUNS(float, f32)
LRN5_RUNS(bf16, bf16)

// The channel of a pack: NHWC and N,F: i % C; NCHW: (i / pixels) % C.
struct Channels {
    FastDiv channels, pixel_packs;
};
template <bool LAST> __device__ __forceinline__ int channel_of(u32 i, const Channels& g) {
    u32 plane = LAST ? i : quotient(i, g.pixel_packs);
    return (int)(plane - quotient(plane, g.channels) * g.channels.divisor);
}

// V channels' values of an array, or one channel's for all V; `missing` where there is no array.
template <int V, bool LAST> __device__ __forceinline__ Pack<float, V> per_channel(const float* values, int c, float missing) {
    if (LAST && values) return load<float, V>(values + c);
    Pack<float, V> all;
    float one = values ? values[c] : missing;
#pragma unroll
    for (int v = 0; v < V; v++) all.v[v] = one;
    return all;
}

// Packs per thread, THREADS apart: where the channels divide THREADS, they are of the same channels.
#define FORWARD_PACKS 4
#define BACKWARD_PACKS 2

// y = (x - mean) * invstd * w + b, then ReLU. With `eps` >= 0 `invstd` is a variance: inference. w, b may be null.
template <typename T, int V, bool LAST>
__device__ __forceinline__ void batch_norm_forward(const T* x, T* y, const float* mean, const float* invstd, const float* w,
                                                   const float* b, u32 packs, Channels g, float eps, int relu) {
    u32 first = blockIdx.x * (FORWARD_PACKS * THREADS) + threadIdx.x;
    Pack<T, V> values[FORWARD_PACKS];
#pragma unroll
    for (int k = 0; k < FORWARD_PACKS; k++)
        if (first + k * THREADS < packs) values[k] = load<T, V>(x + (i64)(first + k * THREADS) * V);
    Pack<float, V> centre, scale, shift;
    int known = -1;
#pragma unroll
    for (int k = 0; k < FORWARD_PACKS; k++) {
        u32 i = first + k * THREADS;
        if (i >= packs) break;
        int c = channel_of<LAST>(i, g) * (LAST ? V : 1);
        if (c != known) {
            known = c;
            centre = per_channel<V, LAST>(mean, c, 0.0f);
            scale = per_channel<V, LAST>(invstd, c, 1.0f);
            shift = per_channel<V, LAST>(b, c, 0.0f);
            Pack<float, V> factor = per_channel<V, LAST>(w, c, 1.0f);
#pragma unroll
            for (int v = 0; v < V; v++)
                scale.v[v] = factor.v[v] * (eps >= 0.0f ? 1.0f / sqrtf(scale.v[v] + eps) : scale.v[v]);
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            float result = (to_float(values[k].v[v]) - centre.v[v]) * scale.v[v] + shift.v[v];
            values[k].v[v] = from_float<T>(relu && result <= 0.0f ? 0.0f : result);
        }
        store<T, V>(y + (i64)i * V, values[k]);
    }
}

// dx = w * invstd * (dy - mean(dy) - (x - mean) * invstd^2 * mean(dy * (x - mean))), dy masked by y > 0 if given.
template <typename T, int V, bool LAST>
__device__ __forceinline__ void batch_norm_backward(const T* x, const T* dy, const T* y, T* dx, const float* mean,
                                                    const float* invstd, const float* w, const float* means, int C, u32 packs,
                                                    Channels g) {
    u32 first = blockIdx.x * (BACKWARD_PACKS * THREADS) + threadIdx.x;
    Pack<T, V> values[BACKWARD_PACKS], gradients[BACKWARD_PACKS], gates[BACKWARD_PACKS];
#pragma unroll
    for (int k = 0; k < BACKWARD_PACKS; k++) {
        i64 at = (i64)(first + k * THREADS) * V;
        if (first + k * THREADS >= packs) break;
        values[k] = load<T, V>(x + at);
        gradients[k] = load<T, V>(dy + at);
        if (y) gates[k] = load<T, V>(y + at);
    }
    Pack<float, V> centre, scale, mean_dy, mean_product;
    int known = -1;
#pragma unroll
    for (int k = 0; k < BACKWARD_PACKS; k++) {
        u32 i = first + k * THREADS;
        if (i >= packs) break;
        int c = channel_of<LAST>(i, g) * (LAST ? V : 1);
        if (c != known) {
            known = c;
            centre = per_channel<V, LAST>(mean, c, 0.0f);
            scale = per_channel<V, LAST>(invstd, c, 1.0f);
            mean_dy = per_channel<V, LAST>(means, c, 0.0f);
            mean_product = per_channel<V, LAST>(means + C, c, 0.0f);
            Pack<float, V> factor = per_channel<V, LAST>(w, c, 1.0f);
#pragma unroll
            for (int v = 0; v < V; v++) scale.v[v] *= factor.v[v];
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            float d = y && to_float(gates[k].v[v]) <= 0.0f ? 0.0f : to_float(gradients[k].v[v]);
            float centred = to_float(values[k].v[v]) - centre.v[v];
            values[k].v[v] = from_float<T>(scale.v[v] * (d - mean_dy.v[v] - centred * mean_product.v[v]));
        }
        store<T, V>(dx + (i64)i * V, values[k]);
    }
}

#define BATCH_NORM(T, V, LAYOUT, LAST, VARIANT)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_forward_##LAYOUT##_##VARIANT(                      \
        const T* x, T* y, const float* mean, const float* invstd, const float* w, const float* b, u32 packs,            \
        Channels g, float eps, int relu) {                                                                              \
        batch_norm_forward<T, V, LAST>(x, y, mean, invstd, w, b, packs, g, eps, relu);                                  \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_backward_##LAYOUT##_##VARIANT(                     \
        const T* x, const T* dy, const T* y, T* dx, const float* mean, const float* invstd, const float* w,             \
        const float* means, int C, u32 packs, Channels g) {                                                             \
        batch_norm_backward<T, V, LAST>(x, dy, y, dx, mean, invstd, w, means, C, packs, g);                             \
    }
BATCH_NORM(float, 4, nhwc, true, f32x4)
BATCH_NORM(float, 1, nhwc, true, f32)
BATCH_NORM(float, 4, nchw, false, f32x4)
BATCH_NORM(float, 1, nchw, false, f32)
BATCH_NORM(bf16, 8, nhwc, true, bf16x8)
BATCH_NORM(bf16, 1, nhwc, true, bf16)
BATCH_NORM(bf16, 8, nchw, false, bf16x8)
BATCH_NORM(bf16, 1, nchw, false, bf16)
