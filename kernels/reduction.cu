// Sums over everything but the channels: the bias gradient, and batch-norm's statistics and gradients.
//
// Two stages, so that the order of additions is fixed: every block writes the sums of its part of the tensor to
// parts[part][sum][channel], then `finish_*` adds the parts up in order. No atomics.

#define FETCHES 4  // loads in flight per thread

// A term says what is summed: which values it fetches at a place, and how they enter its SUMS sums per channel.
template <typename T, int V> struct BiasTerm {  // dY
    static const int SUMS = 1;
    const T* dy;
    struct Values {
        Pack<T, V> dy;
    };
    __device__ __forceinline__ void prepare(int, int, i64) {}
    __device__ __forceinline__ Values fetch(i64 at) const {
        Values x;
        x.dy = load<T, V>(dy + at);
        return x;
    }
    __device__ __forceinline__ void add(const Values& x, float (*sums)[V]) const {
#pragma unroll
        for (int v = 0; v < V; v++) sums[0][v] += to_float(x.dy.v[v]);
    }
};

template <typename T, int V> struct StatisticsTerm {  // X - shift and its square; shift = the channel's first value
    static const int SUMS = 2;
    const T* x;
    float shift[V];
    struct Values {
        Pack<T, V> x;
    };
    __device__ __forceinline__ void prepare(int c, int step, i64 channel_stride) {
#pragma unroll
        for (int v = 0; v < V; v++) shift[v] = to_float(x[(c + v * step) * channel_stride]);
    }
    __device__ __forceinline__ Values fetch(i64 at) const {
        Values values;
        values.x = load<T, V>(x + at);
        return values;
    }
    __device__ __forceinline__ void add(const Values& values, float (*sums)[V]) const {
#pragma unroll
        for (int v = 0; v < V; v++) {
            float d = to_float(values.x.v[v]) - shift[v];
            sums[0][v] += d;
            sums[1][v] += d * d;
        }
    }
};

template <typename T, int V> struct GradientTerm {  // dY and dY * (X - mean); dY counts where Y > 0 if a ReLU follows
    static const int SUMS = 2;
    const T *x, *dy, *y;
    const float* mean;
    float centre[V];
    struct Values {
        Pack<T, V> x, dy, y;
    };
    __device__ __forceinline__ void prepare(int c, int step, i64) {
#pragma unroll
        for (int v = 0; v < V; v++) centre[v] = mean[c + v * step];
    }
    __device__ __forceinline__ Values fetch(i64 at) const {
        Values values;
        values.x = load<T, V>(x + at);
        values.dy = load<T, V>(dy + at);
        if (y) values.y = load<T, V>(y + at);
        return values;
    }
    __device__ __forceinline__ void add(const Values& values, float (*sums)[V]) const {
#pragma unroll
        for (int v = 0; v < V; v++) {
            float g = y && to_float(values.y.v[v]) <= 0.0f ? 0.0f : to_float(values.dy.v[v]);
            sums[0][v] += g;
            sums[1][v] += g * (to_float(values.x.v[v]) - centre[v]);
        }
    }
};

// NHWC and N,F: rows of C values. threadIdx.x counts packs of channels, threadIdx.y rows (a power of two of them).
template <int V, class Term> __device__ __forceinline__ void sum_nhwc(Term term, float* parts, i64 rows, int C) {
    __shared__ float buffer[Term::SUMS * V][THREADS];
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
    float sums[Term::SUMS][V];
#pragma unroll
    for (int k = 0; k < Term::SUMS * V; k++) (&sums[0][0])[k] = 0.0f;
    if (c < C) {
        term.prepare(c, 1, 1);
        i64 stride = (i64)gridDim.y * blockDim.y, row = (i64)blockIdx.y * blockDim.y + threadIdx.y;
        for (; row + (FETCHES - 1) * stride < rows; row += FETCHES * stride) {
            typename Term::Values values[FETCHES];
#pragma unroll
            for (int k = 0; k < FETCHES; k++) values[k] = term.fetch((row + k * stride) * C + c);
#pragma unroll
            for (int k = 0; k < FETCHES; k++) term.add(values[k], sums);
        }
        for (; row < rows; row += stride) term.add(term.fetch(row * C + c), sums);
    }
#pragma unroll
    for (int k = 0; k < Term::SUMS * V; k++) buffer[k][thread] = (&sums[0][0])[k];
    for (int half = blockDim.y / 2; half > 0; half >>= 1) {
        __syncthreads();
        if (threadIdx.y < half)
#pragma unroll
            for (int k = 0; k < Term::SUMS * V; k++) buffer[k][thread] += buffer[k][thread + half * blockDim.x];
    }
    if (threadIdx.y == 0 && c < C)
#pragma unroll
        for (int k = 0; k < Term::SUMS * V; k++)
            parts[((i64)blockIdx.y * Term::SUMS + k / V) * C + c + k % V] = buffer[k][thread];
}

// NCHW: blockIdx.x is the channel, blockIdx.y a range of images; V neighbouring pixels per access.
template <int V, class Term>
__device__ __forceinline__ void sum_nchw(Term term, float* parts, int N, int C, int pixels, FastDiv packs, int images) {
    __shared__ float slots[32];
    int c = blockIdx.x, first = blockIdx.y * images, last = min(first + images, N);
    float sums[Term::SUMS][V];
#pragma unroll
    for (int k = 0; k < Term::SUMS * V; k++) (&sums[0][0])[k] = 0.0f;
    term.prepare(c, 0, pixels);
    u32 count = (u32)(last - first) * packs.divisor, i = threadIdx.x;
    for (; i + (FETCHES - 1) * THREADS < count; i += FETCHES * THREADS) {
        typename Term::Values values[FETCHES];
#pragma unroll
        for (int k = 0; k < FETCHES; k++) {
            u32 j = i + k * THREADS, image = quotient(j, packs);
            values[k] = term.fetch(((i64)(first + image) * C + c) * pixels + (j - image * packs.divisor) * V);
        }
#pragma unroll
        for (int k = 0; k < FETCHES; k++) term.add(values[k], sums);
    }
    for (; i < count; i += THREADS) {
        u32 image = quotient(i, packs);
        term.add(term.fetch(((i64)(first + image) * C + c) * pixels + (i - image * packs.divisor) * V), sums);
    }
#pragma unroll
    for (int s = 0; s < Term::SUMS; s++) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < V; v++) sum += sums[s][v];
        sum = block_sum(sum, slots);
        if (threadIdx.x == 0) parts[((i64)blockIdx.y * Term::SUMS + s) * C + c] = sum;
    }
}

// 32 channels per block of 32 x 32 threads; thread row 0 gets the totals.
template <int SUMS> __device__ __forceinline__ void total(const float* parts, int count, int C, double* sums) {
    __shared__ double buffer[SUMS][32][33];
    int c = blockIdx.x * 32 + threadIdx.x;
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
        double sum = 0.0;
        if (c < C)
#pragma unroll 4
            for (int part = threadIdx.y; part < count; part += 32) sum += parts[((i64)part * SUMS + s) * C + c];
        buffer[s][threadIdx.y][threadIdx.x] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
        sums[s] = 0.0;
        if (threadIdx.y == 0)
            for (int row = 0; row < 32; row++) sums[s] += buffer[s][row][threadIdx.x];
    }
}

extern "C" __global__ void __launch_bounds__(1024) finish_bias(const float* parts, int count, int C, float* db) {
    double sums[1];
    total<1>(parts, count, C, sums);
    int c = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.y == 0 && c < C) db[c] = (float)sums[0];
}

// mean, 1 / sqrt(variance + eps), and the running statistics (or null; the running variance is the unbiased one).
template <typename T>
__device__ __forceinline__ void finish_statistics(const float* parts, int count, int C, const T* x, i64 channel_stride, i64 M,
                                                  float* running_mean, float* running_var, float* mean, float* invstd,
                                                  float momentum, float eps) {
    double sums[2];
    total<2>(parts, count, C, sums);
    int c = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.y != 0 || c >= C) return;
    double offset = sums[0] / M, variance = sums[1] / M - offset * offset;
    if (variance < 0.0) variance = 0.0;
    double average = offset + to_float(x[c * channel_stride]);
    mean[c] = (float)average;
    invstd[c] = (float)(1.0 / sqrt(variance + eps));
    if (running_mean) {
        double unbiased = M > 1 ? variance * M / (M - 1) : variance;
        running_mean[c] = (1.0f - momentum) * running_mean[c] + momentum * (float)average;
        running_var[c] = (1.0f - momentum) * running_var[c] + momentum * (float)unbiased;
    }
}

// dW and db (or null), and for `batch_norm_backward` the two means that dX needs: means[0][c], means[1][c].
extern "C" __global__ void __launch_bounds__(1024) finish_gradient(const float* parts, int count, int C, i64 M,
                                                                   const float* invstd, float* dw, float* db, float* means) {
    double sums[2];
    total<2>(parts, count, C, sums);
    int c = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.y != 0 || c >= C) return;
    double scale = invstd[c];
    if (dw) dw[c] = (float)(sums[1] * scale);
    if (db) db[c] = (float)sums[0];
    means[c] = (float)(sums[0] / M);
    means[C + c] = (float)(sums[1] * scale * scale / M);
}

#define SUMS_NHWC(T, V, VARIANT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        bias_sums_nhwc_##VARIANT(const T* dy, float* parts, i64 rows, int C) {                                          \
        BiasTerm<T, V> term = {dy};                                                                                     \
        sum_nhwc<V>(term, parts, rows, C);                                                                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        statistics_sums_nhwc_##VARIANT(const T* x, float* parts, i64 rows, int C) {                                     \
        StatisticsTerm<T, V> term = {x};                                                                                \
        sum_nhwc<V>(term, parts, rows, C);                                                                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums_nhwc_##VARIANT(                                 \
        const T* x, const T* dy, const T* y, const float* mean, float* parts, i64 rows, int C) {                        \
        GradientTerm<T, V> term = {x, dy, y, mean};                                                                     \
        sum_nhwc<V>(term, parts, rows, C);                                                                              \
    }
SUMS_NHWC(float, 4, f32x4)
SUMS_NHWC(float, 1, f32)
SUMS_NHWC(bf16, 8, bf16x8)
SUMS_NHWC(bf16, 1, bf16)

#define SUMS_NCHW(T, V, VARIANT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) bias_sums_nchw_##VARIANT(                                     \
        const T* dy, float* parts, int N, int C, int pixels, FastDiv packs, int images) {                               \
        BiasTerm<T, V> term = {dy};                                                                                     \
        sum_nchw<V>(term, parts, N, C, pixels, packs, images);                                                          \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) statistics_sums_nchw_##VARIANT(                               \
        const T* x, float* parts, int N, int C, int pixels, FastDiv packs, int images) {                                \
        StatisticsTerm<T, V> term = {x};                                                                                \
        sum_nchw<V>(term, parts, N, C, pixels, packs, images);                                                          \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) gradient_sums_nchw_##VARIANT(                                 \
        const T* x, const T* dy, const T* y, const float* mean, float* parts, int N, int C, int pixels, FastDiv packs,  \
        int images) {                                                                                                   \
        GradientTerm<T, V> term = {x, dy, y, mean};                                                                     \
        sum_nchw<V>(term, parts, N, C, pixels, packs, images);                                                          \
    }
SUMS_NCHW(float, 4, f32x4)
SUMS_NCHW(float, 1, f32)
SUMS_NCHW(bf16, 8, bf16x8)
SUMS_NCHW(bf16, 1, bf16)

#define FINISH_STATISTICS(T, VARIANT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) finish_statistics_##VARIANT(                                     \
        const float* parts, int count, int C, const T* x, i64 channel_stride, i64 M, float* running_mean,               \
        float* running_var, float* mean, float* invstd, float momentum, float eps) {                                    \
        finish_statistics<T>(parts, count, C, x, channel_stride, M, running_mean, running_var, mean, invstd, momentum,  \
                             eps);                                                                                      \
    }
FINISH_STATISTICS(float, f32)
FINISH_STATISTICS(bf16, bf16)
