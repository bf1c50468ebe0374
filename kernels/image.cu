// The first convolution's images, of few channels, as tensor cores want them.

// Windows of X, all R * S * C values of one behind each other: tap (r * S + s) * C + c, and zeros up to a whole pack.
struct Taps {
    int H, W, taps;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    FastDiv C, S;
};
template <typename T, int V>
__device__ __forceinline__ void unfold(const T* x, T* y, int N, Taps g, Split split, u32 count, Strides sx) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Place at = place(i, split);
    int top = at.outer * g.stride_h - g.pad_h, left = at.middle * g.stride_w - g.pad_w;
    int offset[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        u32 tap = (u32)(at.inner * V + v), window = quotient(tap, g.C), r = quotient(window, g.S);
        int h = top + (int)r * g.dilation_h, w = left + (int)(window - r * g.S.divisor) * g.dilation_w;
        bool there = (int)tap < g.taps && h >= 0 && w >= 0 && h < g.H && w < g.W;
        offset[v] = there ? h * sx.h + w * sx.w + (int)(tap - window * g.C.divisor) * sx.c : -1;
    }
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        const T* image = x + n * sx.n;
        Pack<T, V> values;
#pragma unroll
        for (int v = 0; v < V; v++) values.v[v] = offset[v] < 0 ? from_float<T>(0.0f) : image[offset[v]];
        store<T, V>(y + ((i64)n * count + i) * V, values);
    }
}
#define UNFOLD(T, V, VARIANT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        unfold_##VARIANT(const T* x, T* y, int N, Taps g, Split split, u32 count, Strides sx) {                         \
        unfold<T, V>(x, y, N, g, split, count, sx);                                                                     \
    }
UNFOLD(float, 4, f32)
UNFOLD(bf16, 8, bf16)

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
