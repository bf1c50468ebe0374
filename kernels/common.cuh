// What every kernel file shares. It includes no header: with CUDA from wheels alone NVRTC finds none, so bf16 and the
// integer types are our own. `minidnn/ops/kernels.py` pastes this text, and then its family's, in front of a kernel file.
//
// Conventions. Tensors are logically N,C,H,W. A kernel whose name says `nhwc` wants channels innermost (stride 1) and
// takes V of them per thread in one 16-byte access; `nchw` kernels take consecutive pixels of a row. blockIdx.y is the
// image (where a kernel does not say otherwise), so that offsets inside one image fit 32 bits. Arithmetic is in float; a
// result is rounded once, on store.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

#define THREADS 256

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> struct Round;
template <> struct Round<float> {
    __device__ __forceinline__ static float from(float x) { return x; }
};
template <> struct Round<bf16> {  // to nearest, ties to even; NaN stays NaN
    __device__ __forceinline__ static bf16 from(float x) {
        bf16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
        u32 bits = __float_as_uint(x);
        y.bits = x != x ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
        return y;
    }
};
template <typename T> __device__ __forceinline__ T from_float(float x) { return Round<T>::from(x); }

// V values moved by the widest accesses that their size allows (32 bytes are two accesses of 16).
struct Wide {
    uint4 low, high;
};
template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<32> { typedef Wide type; };

template <typename T, int V> union Pack {
    typename Word<sizeof(T) * V>::type word;
    T v[V];
};
template <typename T, int V> __device__ __forceinline__ Pack<T, V> load(const T* p) {
    Pack<T, V> pack;
    pack.word = *reinterpret_cast<const typename Word<sizeof(T) * V>::type*>(p);
    return pack;
}
template <typename T, int V> __device__ __forceinline__ void store(T* p, const Pack<T, V>& pack) {
    *reinterpret_cast<typename Word<sizeof(T) * V>::type*>(p) = pack.word;
}

// Division by a number known at launch: exact for 0 <= n < 2^31 (a multiply, an add and a shift; the host sets it up).
struct FastDiv {
    u32 divisor, multiplier, shift;
};
__device__ __forceinline__ u32 quotient(u32 n, FastDiv d) { return (__umulhi(n, d.multiplier) + n) >> d.shift; }

// A flat index inside one image -> (inner, middle, outer).
struct Split {
    FastDiv inner, middle;
};
struct Place {
    int inner, middle, outer;
};
__device__ __forceinline__ Place place(u32 i, const Split& s) {
    u32 rest = quotient(i, s.inner), outer = quotient(rest, s.middle);
    Place p;
    p.inner = (int)(i - rest * s.inner.divisor);
    p.middle = (int)(rest - outer * s.middle.divisor);
    p.outer = (int)outer;
    return p;
}

// Strides in elements; an image has fewer than 2^31 elements, a batch may have more.
struct Strides {
    i64 n;
    int c, h, w;
};

__device__ __forceinline__ float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

// Sum over a block of THREADS threads, in a fixed order; every thread gets it. `slots` is shared memory of 32 floats.
__device__ __forceinline__ float block_sum(float x, float* slots) {
    x = warp_sum(x);
    __syncthreads();  // the slots may still be read by a previous call
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < (int)(blockDim.x >> 5); i++) total += slots[i];
    return total;
}

// One instruction each on the GPU, right to 22 bits or so.
__device__ __forceinline__ float near_log2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return log2f(x);
#endif
}
__device__ __forceinline__ float near_reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

#define INFINITY_BITS 0x7f800000u
#define NAN_BITS 0x7fc00000u
