// Local response normalization.

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
// The i-th value around the tile: `before` channels in front of it, the rest behind it.
template <bool LAST> __device__ __forceinline__ void around(int i, int before, const Lrn& g, int& c, int& p) {
    p = LAST ? i / (g.size - 1) : i % LRN_PIXELS;
    c = LAST ? i % (g.size - 1) : i / LRN_PIXELS;
    c = c < before ? c - before : c - before + LRN_CHANNELS;
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
            int c, p;
            around<LAST>(i, before, g, c, p);
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

// A channel's own gradient is `direct` less its `value` times the sum of `term` over the window around it.
struct LrnChannel {
    float term, direct, value;
};
template <typename T>
__device__ __forceinline__ LrnChannel lrn_channel(const T* x, const T* y, const float* scale, const T* dy, i64 at,
                                                  bool inside, float beta) {
    float gradient = inside ? to_float(dy[at]) : 0.0f, s = inside ? scale[at] : 1.0f;
    LrnChannel c;
    c.term = inside ? gradient * to_float(y[at]) * near_reciprocal(s) : 0.0f;
    c.direct = gradient * power(s, -beta);
    c.value = inside ? to_float(x[at]) : 0.0f;
    return c;
}

// dx = dy * scale^-beta - 2 * alpha * beta / size * x * sum of dy * y / scale over the channels whose window holds c
template <typename T, bool LAST>
__device__ __forceinline__ void lrn_backward(const T* x, const T* y, const float* scale, const T* dy, T* dx, int N, Lrn g) {
    __shared__ float tile[(LRN_CHANNELS + LRN_MOST) * LRN_PITCH];
    int c0 = blockIdx.y * LRN_CHANNELS, p0 = blockIdx.x * LRN_PIXELS, before = (g.size - 1) / 2;
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        i64 image = (i64)n * g.C * g.pixels;
        LrnChannel mine[LRN_OWN];
#pragma unroll
        for (int u = 0; u < LRN_OWN; u++) {
            int c, p;
            own<LAST>(u, c, p);
            bool inside = c0 + c < g.C && p0 + p < g.pixels;
            i64 at = image + lrn_offset<LAST>(c0 + c, p0 + p, g);
            mine[u] = lrn_channel<T>(x, y, scale, dy, at, inside, g.beta);
            tile[(c + before) * LRN_PITCH + p] = mine[u].term;
        }
        for (int i = threadIdx.x; i < (g.size - 1) * LRN_PIXELS; i += THREADS) {
            int c, p;
            around<LAST>(i, before, g, c, p);
            bool inside = c0 + c >= 0 && c0 + c < g.C && p0 + p < g.pixels;
            i64 at = image + lrn_offset<LAST>(c0 + c, p0 + p, g);
            tile[(c + before) * LRN_PITCH + p] = lrn_channel<T>(x, y, scale, dy, at, inside, g.beta).term;
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
                from_float<T>(mine[u].direct - 2.0f * g.alpha_over_size * g.beta * mine[u].value * sum);
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

// The same window, NCHW: a thread takes a run of channels of a pixel and the two on either side of it; lanes take
// neighbouring pixels. Thread i of an image (blockIdx.y): pixel i % pixels of the run i / pixels. Forward has all loads of
// a run at once.
#define LRN_RUN 8
#define LRN_RUN_BACK 32
#define LRN_STEP 4

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

// Backward reads four arrays: runs are longer, so that fewer channels are read for two of them, and a thread walks along
// its run with the channels of the window at hand, LRN_STEP new ones at once.
template <typename T>
__device__ __forceinline__ void lrn5_backward_runs(const T* x, const T* y, const float* scale, const T* dy, T* dx, int N,
                                                   u32 count, FastDiv pixels, Lrn g) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    u32 run = quotient(i, pixels);
    int c0 = (int)run * LRN_RUN_BACK, p = (int)(i - run * pixels.divisor);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        i64 image = (i64)n * g.C * g.pixels + p;
        LrnChannel window[2 * LRN_REACH + LRN_STEP];  // from LRN_REACH channels before `start`
#pragma unroll
        for (int j = 0; j < 2 * LRN_REACH; j++) {
            int c = c0 + j - LRN_REACH;
            window[j] = lrn_channel<T>(x, y, scale, dy, image + c * (i64)g.pixels, c >= 0 && c < g.C, g.beta);
        }
        for (int start = c0; start < c0 + LRN_RUN_BACK && start < g.C; start += LRN_STEP) {
#pragma unroll
            for (int j = 2 * LRN_REACH; j < 2 * LRN_REACH + LRN_STEP; j++) {
                int c = start + j - LRN_REACH;
                window[j] = lrn_channel<T>(x, y, scale, dy, image + c * (i64)g.pixels, c < g.C, g.beta);
            }
#pragma unroll
            for (int k = 0; k < LRN_STEP; k++) {
                if (start + k >= g.C) break;
                float sum = 0.0f;
#pragma unroll
                for (int j = k; j <= k + 2 * LRN_REACH; j++) sum += window[j].term;
                const LrnChannel& own = window[k + LRN_REACH];
                dx[image + (start + k) * (i64)g.pixels] =
                    from_float<T>(own.direct - 2.0f * g.alpha_over_size * g.beta * own.value * sum);
            }
#pragma unroll
            for (int j = 0; j < 2 * LRN_REACH; j++) window[j] = window[j + LRN_STEP];
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
