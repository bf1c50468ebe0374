// Dropout with counter-based random bits: nothing is saved, backward makes the same bits again.
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011). The key is the seed;
// the counter is (element / 4, op, step, micro-step); word element % 4 decides. `element` counts in logical N,C,H,W
// order whatever the memory layout, so that all devices and layouts drop the same elements.

__device__ __forceinline__ uint4 philox(u32 block, u32 op, u32 step, u32 micro_step, u32 key0, u32 key1) {
    uint4 c = {block, op, step, micro_step};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        u32 high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c.x = high1 ^ c.y ^ key0;
        c.y = low1;
        c.z = high0 ^ c.w ^ key1;
        c.w = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

struct Bits {
    u32 op, step, micro_step, key0, key1;
    __device__ __forceinline__ Bits(const double* scalars, u32 op)
        : op(op), step((u32)scalars[2]), micro_step((u32)scalars[3]), key0((u32)scalars[4]), key1((u32)scalars[5]) {}
    __device__ __forceinline__ uint4 of(i64 element) const {
        return philox((u32)(element >> 2), op, step, micro_step, key0, key1);
    }
};
__device__ __forceinline__ u32 word(uint4 bits, int i) { return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w; }

// Memory order is logical order: V neighbours take V / 4 counters.
template <typename T, int V>
__device__ __forceinline__ void dropout(const T* x, T* y, const double* scalars, i64 count, u32 threshold, float scale, u32 op) {
    i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * V;
    if (i >= count) return;
    Bits bits(scalars, op);
    if (i + V <= count) {
        Pack<T, V> a = load<T, V>(x + i);
#pragma unroll
        for (int group = 0; group < V; group += 4) {
            uint4 random = bits.of(i + group);
#pragma unroll
            for (int v = 0; v < 4; v++) {
                float kept = word(random, v) >= threshold ? scale : 0.0f;
                a.v[group + v] = from_float<T>(to_float(a.v[group + v]) * kept);
            }
        }
        store<T, V>(y + i, a);
    } else {
        for (; i < count; i++) {
            float kept = word(bits.of(i), (int)(i & 3)) >= threshold ? scale : 0.0f;
            y[i] = from_float<T>(to_float(x[i]) * kept);
        }
    }
}

// NHWC: a thread takes V channels of G neighbouring pixels. G = 4 needs a multiple of 4 pixels per image, so that the
// four pixels of a channel share one counter; G = 1 does every element on its own.
template <typename T, int V, int G>
__device__ __forceinline__ void dropout_nhwc(const T* x, T* y, const double* scalars, int N, int C, int pixels, FastDiv packs,
                                             u32 count, u32 threshold, float scale, u32 op) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Bits bits(scalars, op);
    u32 group = quotient(i, packs);
    int c = (int)(i - group * packs.divisor) * V, pixel = (int)group * G;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        i64 at = ((i64)n * pixels + pixel) * C + c;
        Pack<T, V> a[G];
#pragma unroll
        for (int g = 0; g < G; g++) a[g] = load<T, V>(x + at + (i64)g * C);
#pragma unroll
        for (int v = 0; v < V; v++) {
            i64 element = ((i64)n * C + c + v) * pixels + pixel;
            uint4 random = bits.of(element);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float kept = word(random, G == 4 ? g : (int)(element & 3)) >= threshold ? scale : 0.0f;
                a[g].v[v] = from_float<T>(to_float(a[g].v[v]) * kept);
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) store<T, V>(y + at + (i64)g * C, a[g]);
    }
}

#define DROPOUT(T, V, VARIANT)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) dropout_##VARIANT(                                            \
        const T* x, T* y, const double* scalars, i64 count, u32 threshold, float scale, u32 op) {                       \
        dropout<T, V>(x, y, scalars, count, threshold, scale, op);                                                      \
    }
DROPOUT(float, 4, f32x4)
DROPOUT(bf16, 8, bf16x8)

#define DROPOUT_NHWC(T, V, G, VARIANT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) dropout_nhwc_##VARIANT(                                       \
        const T* x, T* y, const double* scalars, int N, int C, int pixels, FastDiv packs, u32 count, u32 threshold,     \
        float scale, u32 op) {                                                                                          \
        dropout_nhwc<T, V, G>(x, y, scalars, N, C, pixels, packs, count, threshold, scale, op);                         \
    }
DROPOUT_NHWC(float, 4, 4, f32x4_g4)
DROPOUT_NHWC(float, 1, 1, f32)
DROPOUT_NHWC(bf16, 4, 4, bf16x4_g4)
DROPOUT_NHWC(bf16, 1, 1, bf16)
