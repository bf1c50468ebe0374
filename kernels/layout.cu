// Change of memory layout, with a change of type on the way where the types differ.

#define TILE 64

// A batch of A x B matrices to B x A: NCHW -> NHWC with A = channels, B = pixels, and back the other way round.
// A tile goes through shared memory, so that both sides are accessed along their rows: VX values per load and VY per
// store (B and A are multiples of them). The tile holds words of 4 bytes, each of W values of one row of Y; columns of X
// that one load takes lie COLUMNS rows apart in it, and with the word of padding no banks conflict.
template <typename TX, typename TY, int VX, int VY>
__device__ __forceinline__ void transpose(const TX* x, TY* y, int N, int A, int B) {
    const int W = 4 / sizeof(TY), COLUMNS = TILE / VX, STEP = THREADS / COLUMNS, UNITS = TILE / W / STEP, STORES = TILE / VY;
    __shared__ u32 tile[TILE][TILE / W + 1];
    int a0 = blockIdx.y * TILE, b0 = blockIdx.x * TILE, column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    for (int n = blockIdx.z; n < N; n += gridDim.z) {
        const TX* source = x + (i64)n * A * B;
        TY* target = y + (i64)n * A * B;
        Pack<TX, VX> packs[UNITS][W];
        const TX* from = source + (i64)(a0 + group * W) * B + b0 + column * VX;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {  // all loads are issued before the first store
            int a = a0 + (group + u * STEP) * W;
#pragma unroll
            for (int w = 0; w < W; w++)
                if (a + w < A && b0 + column * VX < B) packs[u][w] = load<TX, VX>(from + w * (i64)B);
            from += STEP * W * (i64)B;
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int v = 0; v < VX; v++) {
                Pack<TY, W> word;
#pragma unroll
                for (int w = 0; w < W; w++) word.v[w] = from_float<TY>(to_float(packs[u][w].v[v]));
                tile[column + v * COLUMNS][group + u * STEP] = word.word;
            }
        __syncthreads();
        int a = threadIdx.x % STORES * VY;
        TY* to = target + (i64)(b0 + threadIdx.x / STORES) * A + a0 + a;
#pragma unroll 4
        for (int b = threadIdx.x / STORES; b < TILE; b += THREADS / STORES) {
            const TY* row = reinterpret_cast<const TY*>(tile[b / VX + b % VX * COLUMNS]);
            if (a0 + a < A && b0 + b < B) store<TY, VY>(to, load<TY, VY>(row + a));
            to += THREADS / STORES * (i64)A;
        }
        __syncthreads();
    }
}
#define TRANSPOSE(TX, TY, VX, VY, VARIANT)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                            \
        transpose_##VARIANT(const TX* x, TY* y, int N, int A, int B) {                                                  \
        transpose<TX, TY, VX, VY>(x, y, N, A, B);                                                                       \
    }
TRANSPOSE(float, float, 2, 1, f32x2_f32)
TRANSPOSE(float, float, 1, 1, f32_f32)
TRANSPOSE(bf16, float, 2, 1, bf16x2_f32)
TRANSPOSE(bf16, float, 1, 1, bf16_f32)
TRANSPOSE(float, bf16, 2, 2, f32x2_bf16x2)
TRANSPOSE(float, bf16, 2, 1, f32x2_bf16)
TRANSPOSE(float, bf16, 1, 2, f32_bf16x2)
TRANSPOSE(float, bf16, 1, 1, f32_bf16)
TRANSPOSE(bf16, bf16, 2, 2, bf16x2_bf16x2)
TRANSPOSE(bf16, bf16, 2, 1, bf16x2_bf16)
TRANSPOSE(bf16, bf16, 1, 2, bf16_bf16x2)
TRANSPOSE(bf16, bf16, 1, 1, bf16_bf16)

// As it is: `count` times 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) copy(const uint4* x, uint4* y, i64 count) {
    i64 first = (i64)blockIdx.x * (4 * THREADS) + threadIdx.x;
    uint4 words[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (first + k * THREADS < count) words[k] = x[first + k * THREADS];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (first + k * THREADS < count) y[first + k * THREADS] = words[k];
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

#define LAYOUT(TX, TY, VARIANT)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        strided_copy_##VARIANT(const TX* x, TY* y, int outer, Copy strides, Split split, u32 count) {                   \
        strided_copy<TX, TY>(x, y, outer, strides, split, count);                                                       \
    }
LAYOUT(float, float, f32_f32)
LAYOUT(float, bf16, f32_bf16)
LAYOUT(bf16, float, bf16_f32)
LAYOUT(bf16, bf16, bf16_bf16)
