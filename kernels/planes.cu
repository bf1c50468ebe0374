// Max-pooling of whole NCHW planes. A block takes planes that lie one behind the other through shared memory, so that the
// card's memory is read and written in order however long a row is. The index and ties are those of pooling.cu.

#define PIXELS 4096   // of a block's input planes, at most
#define WINDOWS 1024  // of its output planes
#define IN_FLIGHT 8   // loads of a thread that are issued before the first is stored

struct Planes {
    int H, W, P, Q, pad_h, pad_w;  // input rows and columns, output rows and columns, padding in front
    u32 each, total;               // planes per block, and of the tensor
    FastDiv windows, by_Q;         // by P * Q and Q
    FastDiv tiles, tiles_w;        // by the tiles of a plane and those of a row of tiles; see the backward pass
};

template <typename T> __device__ __forceinline__ void copy_in_order(const T* from, T* to, u32 count) {
    for (u32 start = threadIdx.x; start < count; start += IN_FLIGHT * THREADS) {
        T held[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (start + k * THREADS < count) held[k] = from[start + k * THREADS];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (start + k * THREADS < count) to[start + k * THREADS] = held[k];
    }
}

template <typename T, int K, int ST>
__device__ __forceinline__ void max_pool_forward(const T* x, T* y, i8* index, Planes g, int relu) {
    __shared__ T pixels[PIXELS];
    const u32 first = blockIdx.x * g.each, planes = min(g.each, g.total - first);
    copy_in_order<T>(x + (i64)first * g.H * g.W, pixels, planes * g.H * g.W);
    __syncthreads();
    const i64 out = (i64)first * g.P * g.Q;
    for (u32 i = threadIdx.x; i < planes * g.windows.divisor; i += THREADS) {
        u32 plane = quotient(i, g.windows), rest = i - plane * g.windows.divisor, p = quotient(rest, g.by_Q);
        int h = (int)p * ST - g.pad_h, w = (int)(rest - p * g.by_Q.divisor) * ST - g.pad_w;
        const T* source = pixels + plane * g.H * g.W;
        float best = -__uint_as_float(INFINITY_BITS);
        int at = -1;
#pragma unroll
        for (int tap = 0; tap < K * K; tap++) {
            int row = h + tap / K, column = w + tap % K;
            if (row < 0 || column < 0 || row >= g.H || column >= g.W) continue;
            float value = to_float(source[row * g.W + column]);
            if (value > best || value != value || at < 0) {
                best = value;
                at = tap;
            }
        }
        bool dead = relu && best <= 0.0f;
        y[out + i] = from_float<T>(dead ? 0.0f : best);
        if (index) index[out + i] = (i8)(dead ? -1 : at);
    }
}

// A thread owns the ST x ST pixels, a tile, that begin where a window does, and reads each window that reaches them once.
template <typename T, int K, int ST>
__device__ __forceinline__ void max_pool_backward(const T* dy, const i8* index, T* dx, Planes g) {
    __shared__ T pixels[PIXELS], gradients[WINDOWS];
    __shared__ i8 taps[WINDOWS];
    const int D = (K - 1) / ST;  // windows that reach into a tile from before it, per direction
    const u32 first = blockIdx.x * g.each, planes = min(g.each, g.total - first);
    const u32 windows = planes * g.windows.divisor;
    copy_in_order<T>(dy + (i64)first * g.P * g.Q, gradients, windows);
    copy_in_order<i8>(index + (i64)first * g.P * g.Q, taps, windows);
    __syncthreads();
    for (u32 i = threadIdx.x; i < planes * g.tiles.divisor; i += THREADS) {
        u32 plane = quotient(i, g.tiles), rest = i - plane * g.tiles.divisor, th = quotient(rest, g.tiles_w);
        u32 tw = rest - th * g.tiles_w.divisor;
        float sum[ST][ST];
#pragma unroll
        for (int a = 0; a < ST * ST; a++) sum[a / ST][a % ST] = 0.0f;
#pragma unroll
        for (int window = 0; window < (D + 1) * (D + 1); window++) {
            const int back_h = D - window / (D + 1), back_w = D - window % (D + 1);
            int p = (int)th - back_h, q = (int)tw - back_w;
            if (p < 0 || q < 0 || p >= g.P || q >= g.Q) continue;
            u32 from = plane * g.windows.divisor + p * g.Q + q;
            float gradient = to_float(gradients[from]);
            int tap = taps[from];
#pragma unroll
            for (int a = 0; a < ST * ST; a++) {
                const int r = back_h * ST + a / ST, s = back_w * ST + a % ST;
                if (r < K && s < K && tap == r * K + s) sum[a / ST][a % ST] += gradient;
            }
        }
#pragma unroll
        for (int a = 0; a < ST * ST; a++) {
            int h = (int)th * ST - g.pad_h + a / ST, w = (int)tw * ST - g.pad_w + a % ST;
            if (h >= 0 && w >= 0 && h < g.H && w < g.W)
                pixels[plane * g.H * g.W + h * g.W + w] = from_float<T>(sum[a / ST][a % ST]);
        }
    }
    __syncthreads();
    copy_in_order<T>(pixels, dx + (i64)first * g.H * g.W, planes * g.H * g.W);
}

#define MAX_POOL_PLANES(T, VARIANT, K, ST)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_forward_planes_##VARIANT(                            \
        const T* x, T* y, i8* index, Planes g, int relu) {                                                              \
        max_pool_forward<T, K, ST>(x, y, index, g, relu);                                                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_planes_##VARIANT(                           \
        const T* dy, const i8* index, T* dx, Planes g) {                                                                \
        max_pool_backward<T, K, ST>(dy, index, dx, g);                                                                  \
    }
MAX_POOL_PLANES(float, f32_k2s2, 2, 2)
MAX_POOL_PLANES(float, f32_k3s2, 3, 2)
MAX_POOL_PLANES(bf16, bf16_k2s2, 2, 2)
MAX_POOL_PLANES(bf16, bf16_k3s2, 3, 2)
