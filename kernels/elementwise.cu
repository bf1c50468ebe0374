// Activations and their gradients, sums, the bias that no convolution took along, and the squared error.
//
// Operands share one dense layout, so a flat index serves all of them. An output may be one of the inputs.

// Each thread takes V neighbours in one access; the last one finishes what is left over.
template <class F, typename TX, typename TY, int V>
__device__ __forceinline__ void map1(const TX* x, TY* y, i64 count, F f) {
    i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i + V <= count) {
        Pack<TX, V> a = load<TX, V>(x + i);
        Pack<TY, V> result;
#pragma unroll
        for (int v = 0; v < V; v++) result.v[v] = from_float<TY>(f(to_float(a.v[v])));
        store<TY, V>(y + i, result);
    } else {
        for (; i < count; i++) y[i] = from_float<TY>(f(to_float(x[i])));
    }
}
template <class F, typename T, int V>
__device__ __forceinline__ void map2(const T* x1, const T* x2, T* y, i64 count, F f) {
    i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i + V <= count) {
        Pack<T, V> a = load<T, V>(x1 + i), b = load<T, V>(x2 + i), result;
#pragma unroll
        for (int v = 0; v < V; v++) result.v[v] = from_float<T>(f(to_float(a.v[v]), to_float(b.v[v])));
        store<T, V>(y + i, result);
    } else {
        for (; i < count; i++) y[i] = from_float<T>(f(to_float(x1[i]), to_float(x2[i])));
    }
}

struct Identity {
    __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct Relu {
    __device__ __forceinline__ float operator()(float x) const { return x <= 0.0f ? 0.0f : x; }
};
struct LeakyRelu {
    float slope;
    __device__ __forceinline__ float operator()(float x) const { return x > 0.0f ? x : slope * x; }
};
struct Sigmoid {
    __device__ __forceinline__ float operator()(float x) const { return 1.0f / (1.0f + expf(-x)); }
};
struct Tanh {
    __device__ __forceinline__ float operator()(float x) const { return tanhf(x); }
};
// Gradients take what forward saved (Y; X for the leaky ReLU) and dY.
struct ReluGradient {
    __device__ __forceinline__ float operator()(float y, float dy) const { return y <= 0.0f ? 0.0f : dy; }
};
struct LeakyReluGradient {
    float slope;
    __device__ __forceinline__ float operator()(float x, float dy) const { return x > 0.0f ? dy : slope * dy; }
};
struct SigmoidGradient {
    __device__ __forceinline__ float operator()(float y, float dy) const { return dy * y * (1.0f - y); }
};
struct TanhGradient {
    __device__ __forceinline__ float operator()(float y, float dy) const { return dy * (1.0f - y * y); }
};
struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

#define MAP1(NAME, TX, TY, V, VARIANT, F)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##VARIANT(const TX* x, TY* y, i64 count, float slope) { \
        map1<decltype(F), TX, TY, V>(x, y, count, F);                                                                   \
    }
#define MAP2(NAME, T, V, VARIANT, F)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        NAME##_##VARIANT(const T* a, const T* b, T* y, i64 count, float slope) {                                        \
        map2<decltype(F), T, V>(a, b, y, count, F);                                                                     \
    }
#define MAP1_ALL(NAME, F)                   \
    MAP1(NAME, float, float, 4, f32x4, F)   \
    MAP1(NAME, float, float, 1, f32, F)     \
    MAP1(NAME, bf16, bf16, 8, bf16x8, F)    \
    MAP1(NAME, bf16, bf16, 1, bf16, F)
#define MAP2_ALL(NAME, F)          \
    MAP2(NAME, float, 4, f32x4, F) \
    MAP2(NAME, float, 1, f32, F)   \
    MAP2(NAME, bf16, 8, bf16x8, F) \
    MAP2(NAME, bf16, 1, bf16, F)

MAP1_ALL(relu_forward, Relu())
MAP1_ALL(leaky_relu_forward, LeakyRelu{slope})
MAP1_ALL(sigmoid_forward, Sigmoid())
MAP1_ALL(tanh_forward, Tanh())
MAP2_ALL(relu_backward, ReluGradient())
MAP2_ALL(leaky_relu_backward, LeakyReluGradient{slope})
MAP2_ALL(sigmoid_backward, SigmoidGradient())
MAP2_ALL(tanh_backward, TanhGradient())
MAP2_ALL(add, Sum())
MAP1(cast_f32, float, bf16, 8, bf16x8, Identity())
MAP1(cast_f32, float, bf16, 1, bf16, Identity())
MAP1(cast_bf16, bf16, float, 8, f32x8, Identity())
MAP1(cast_bf16, bf16, float, 1, f32, Identity())

// y += b[channel], then ReLU: in place. NHWC and N,F: channel = i % C; NCHW: channel = (i / pixels) % C.
template <typename T, int V, bool LAST>
__device__ __forceinline__ void bias_relu(T* y, const float* b, u32 packs, FastDiv channels, FastDiv pixel_packs, int relu) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= packs) return;
    u32 plane = LAST ? i : quotient(i, pixel_packs);
    u32 c = plane - quotient(plane, channels) * channels.divisor;
    Pack<T, V> value = load<T, V>(y + (i64)i * V);
#pragma unroll
    for (int v = 0; v < V; v++) {
        float sum = to_float(value.v[v]) + b[LAST ? c * V + v : c];
        value.v[v] = from_float<T>(relu && sum <= 0.0f ? 0.0f : sum);
    }
    store<T, V>(y + (i64)i * V, value);
}
#define BIAS_RELU(T, V, LAYOUT, LAST, VARIANT)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) bias_relu_##LAYOUT##_##VARIANT(                               \
        T* y, const float* b, u32 packs, FastDiv channels, FastDiv pixel_packs, int relu) {                             \
        bias_relu<T, V, LAST>(y, b, packs, channels, pixel_packs, relu);                                                \
    }
BIAS_RELU(float, 4, nhwc, true, f32x4)
BIAS_RELU(float, 1, nhwc, true, f32)
BIAS_RELU(float, 4, nchw, false, f32x4)
BIAS_RELU(float, 1, nchw, false, f32)
BIAS_RELU(bf16, 8, nhwc, true, bf16x8)
BIAS_RELU(bf16, 1, nhwc, true, bf16)
BIAS_RELU(bf16, 8, nchw, false, bf16x8)
BIAS_RELU(bf16, 1, nchw, false, bf16)

// Squared error: every block leaves its sum in `parts`; `finish_loss` (softmax.cu) adds them up.
template <typename T>
__device__ __forceinline__ void mse_forward(const T* x, const float* target, float* parts, i64 count) {
    __shared__ float slots[32];
    float sum = 0.0f;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS) {
        float difference = to_float(x[i]) - target[i];
        sum += difference * difference;
    }
    sum = block_sum(sum, slots);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
template <typename T>
__device__ __forceinline__ void mse_backward(const T* x, const float* target, T* dx, const double* scalars, i64 count) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) dx[i] = from_float<T>(2.0f * (float)scalars[1] * (to_float(x[i]) - target[i]));
}
#define MSE(T, VARIANT)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        mse_forward_##VARIANT(const T* x, const float* target, float* parts, i64 count) {                               \
        mse_forward<T>(x, target, parts, count);                                                                        \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        mse_backward_##VARIANT(const T* x, const float* target, T* dx, const double* scalars, i64 count) {              \
        mse_backward<T>(x, target, dx, scalars, count);                                                                 \
    }
MSE(float, f32)
MSE(bf16, bf16)
