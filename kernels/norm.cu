// The element-wise half of batch-norm; its sums are in reduction.cu.

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
