// Change of memory layout, with a change of type on the way where the types differ.

#define TILE 64

// A batch of A x B matrices to B x A: NCHW -> NHWC with A = channels, B = pixels, and back the other way round.
// A tile goes through shared memory, so that both sides are accessed along their rows.
template <typename TX, typename TY>
__device__ __forceinline__ void transpose(const TX* x, TY* y, int N, int A, int B) {
    __shared__ TY tile[TILE][TILE + 4 / sizeof(TY)];  // one word of padding per row: no bank conflicts
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int a0 = blockIdx.y * TILE, b0 = blockIdx.x * TILE;
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        const TX* source = x + (i64)n * A * B;
        TY* target = y + (i64)n * A * B;
#pragma unroll
        for (int a = warp; a < TILE; a += THREADS / 32)
#pragma unroll
            for (int b = lane; b < TILE; b += 32)
                if (a0 + a < A && b0 + b < B)
                    tile[a][b] = from_float<TY>(to_float(source[(i64)(a0 + a) * B + b0 + b]));
        __syncthreads();
#pragma unroll
        for (int b = warp; b < TILE; b += THREADS / 32)
#pragma unroll
            for (int a = lane; a < TILE; a += 32)
                if (a0 + a < A && b0 + b < B) target[(i64)(b0 + b) * A + a0 + a] = tile[a][b];
        __syncthreads();
    }
}

// Any strides. Threads follow the output's memory order (axis 0 innermost); blockIdx.y is the outermost axis.
struct Copy {
    i64 x_outer, y_outer;
    int x0, x1, x2, y0, y1, y2;
};
template <typename TX, typename TY>
__device__ __forceinline__ void strided_copy(const TX* x, TY* y, int outer, Copy strides, Split split, u32 count) {
    for (int n = blockIdx.y; n < outer; n += gridDim.y)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 i = (blockIdx.x * 4 + k) * THREADS + threadIdx.x;
            if (i >= count) break;
            Place at = place(i, split);
            i64 from = n * strides.x_outer + (i64)at.inner * strides.x0 + (i64)at.middle * strides.x1 + (i64)at.outer * strides.x2;
            i64 to = n * strides.y_outer + (i64)at.inner * strides.y0 + (i64)at.middle * strides.y1 + (i64)at.outer * strides.y2;
            y[to] = from_float<TY>(to_float(x[from]));
        }
}

// Images of three planes to pixels of three channels, V pixels per thread: of each plane one access, and three to store.
template <typename TX, typename TY, int V>
__device__ __forceinline__ void interleave(const TX* x, TY* y, int N, u32 pixels) {
    u32 at = (blockIdx.x * THREADS + threadIdx.x) * V;
    if (at >= pixels) return;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const TX* source = x + (i64)n * 3 * pixels + at;
        TY* target = y + ((i64)n * pixels + at) * 3;
        Pack<TX, V> planes[3];
        Pack<TY, V> values[3];
#pragma unroll
        for (int c = 0; c < 3; c++) planes[c] = load<TX, V>(source + (i64)c * pixels);
#pragma unroll
        for (int k = 0; k < 3 * V; k++) values[k / V].v[k % V] = from_float<TY>(to_float(planes[k % 3].v[k / 3]));
#pragma unroll
        for (int k = 0; k < 3; k++) store<TY, V>(target + k * V, values[k]);
    }
}
#define INTERLEAVE(TX, TY, V, VARIANT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) interleave_##VARIANT(const TX* x, TY* y, int N, u32 pixels) { \
        interleave<TX, TY, V>(x, y, N, pixels);                                                                         \
    }
INTERLEAVE(float, float, 4, f32_f32x4)
INTERLEAVE(float, float, 1, f32_f32)
INTERLEAVE(float, bf16, 8, f32_bf16x8)
INTERLEAVE(float, bf16, 1, f32_bf16)

// Fewer channels than 16 bytes hold, innermost, and zeros behind them: one store per pixel.
template <typename T, int V> __device__ __forceinline__ void pad_channels(const T* x, T* y, u32 pixels, int C) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = (blockIdx.x * 4 + k) * THREADS + threadIdx.x;
        if (i >= pixels) break;
        Pack<T, V> pixel;
#pragma unroll
        for (int v = 0; v < V; v++) pixel.v[v] = v < C ? x[(i64)i * C + v] : from_float<T>(0.0f);
        store<T, V>(y + (i64)i * V, pixel);
    }
}
#define PAD(T, V, VARIANT)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) pad_channels_##VARIANT(const T* x, T* y, u32 pixels, int C) { \
        pad_channels<T, V>(x, y, pixels, C);                                                                            \
    }
PAD(float, 4, f32)
PAD(bf16, 8, bf16)

#define LAYOUT(TX, TY, VARIANT)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        transpose_##VARIANT(const TX* x, TY* y, int N, int A, int B) {                                                  \
        transpose<TX, TY>(x, y, N, A, B);                                                                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        strided_copy_##VARIANT(const TX* x, TY* y, int outer, Copy strides, Split split, u32 count) {                   \
        strided_copy<TX, TY>(x, y, outer, strides, split, count);                                                       \
    }
LAYOUT(float, float, f32_f32)
LAYOUT(float, bf16, f32_bf16)
LAYOUT(bf16, float, bf16_f32)
LAYOUT(bf16, bf16, bf16_bf16)
