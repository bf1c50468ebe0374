// Max-pooling over large windows, up to the whole image.

struct Clip {
    int first, count;
};

// Of a window's taps along one axis, those inside the image; the first tap of all is at `at`.
__device__ __forceinline__ Clip clip(int at, int taps, int dilation, int extent) {
    int first = at < 0 ? (dilation - 1 - at) / dilation : 0;
    int end = at < extent ? min(taps, (extent - 1 - at) / dilation + 1) : 0;
    return {first, max(end - first, 0)};
}

// Whether the maximum `other` of some taps of a window is the window's, rather than `best` of other taps.
__device__ __forceinline__ bool wins(float other, int tap, float best, int at) {
    if (tap < 0 || at < 0) return tap >= 0;
    const bool nan = best != best, others = other != other;
    if (nan || others) return others && (!nan || tap > at);
    return other > best || (other == best && tap < at);
}

template <int V>
__device__ __forceinline__ void take(const float* others, const int* taps, float* best, int* at) {
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (wins(others[v], taps[v], best[v], at[v])) {
            best[v] = others[v];
            at[v] = taps[v];
        }
    }
}

// Who works on a window, or on PACKS side by side of V channels each: the lanes of a warp, or of all warps of a block.
// `window`: which one; `lane`: who of `lanes` the caller is.
struct Team {
    u32 window;
    int lane, lanes;
};
template <int PACKS> __device__ __forceinline__ Team team_of(int warps) {
    const int warp = threadIdx.x / 32, per_block = THREADS / 32 / warps, each = 32 / PACKS;
    return {blockIdx.x * per_block + warp / warps, warp % warps * each + (int)threadIdx.x % 32 / PACKS, warps * each};
}

// What a block's warps found.
template <int V, int PACKS> struct Found {
    float best[THREADS / 32][PACKS][V];
    int at[THREADS / 32][PACKS][V];
};

// A team searches its window, every lane every so many-th tap. The maximum reaches all of them, with its place `at` among
// the taps inside the image.
template <typename T, int V, int PACKS>
__device__ __forceinline__ void search_together(const T* source, int h, int w, Clip rows, Clip columns, bool there,
                                                const Team& team, Found<V, PACKS>& found, const Pool& g,
                                                const Strides& sx, float* best, int* at) {
    const int FLIGHT = 8;
    const int area = there ? rows.count * columns.count : 0;
    const bool whole = columns.count == g.W && g.dilation_h == 1;  // its rows lie behind each other
    source += (h + rows.first * g.dilation_h) * sx.h + (w + columns.first * g.dilation_w) * sx.w;
#pragma unroll
    for (int v = 0; v < V; v++) {
        best[v] = -__uint_as_float(INFINITY_BITS);
        at[v] = -1;
    }
    for (int first = team.lane; first < area; first += FLIGHT * team.lanes) {
        Pack<T, V> taps[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++) {
            const int tap = first + k * team.lanes, r = tap / columns.count, s = tap - r * columns.count;
            if (tap < area)
                taps[k] = load<T, V>(source + (whole ? tap * sx.w : r * g.dilation_h * sx.h + s * g.dilation_w * sx.w));
        }
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (first + k * team.lanes < area) consider<T, V, false>(taps[k], first + k * team.lanes, best, at);
    }
#pragma unroll
    for (int step = 16; step >= PACKS; step >>= 1) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            float other = __shfl_xor_sync(0xffffffffu, best[v], step);
            int tap = __shfl_xor_sync(0xffffffffu, at[v], step);
            take<1>(&other, &tap, best + v, at + v);
        }
    }
    if (team.lanes == 32 / PACKS) return;
    const int warp = threadIdx.x / 32, pack = threadIdx.x % PACKS;
    if (threadIdx.x % 32 < PACKS) {
#pragma unroll
        for (int v = 0; v < V; v++) {
            found.best[warp][pack][v] = best[v];
            found.at[warp][pack][v] = at[v];
        }
    }
    __syncthreads();
    for (int other = 0; other < THREADS / 32; other++) take<V>(found.best[other][pack], found.at[other][pack], best, at);
    __syncthreads();  // before the next image's
}

// `count`: windows (of PACKS packs of channels) per image; `warps` share one.
template <typename T, int V, bool LAST, int PACKS>
__device__ __forceinline__ void max_pool_forward_large(const T* x, T* y, i8* index, int N, Pool g, Split split,
                                                       u32 count, int warps, Strides sx, Strides sy, int relu) {
    __shared__ Found<V, PACKS> found;
    const Team team = team_of<PACKS>(warps);
    if (team.window >= count) return;
    Place at = place(team.window, split);
    int c = LAST ? (at.inner * PACKS + threadIdx.x % PACKS) * V : at.outer;
    int p = LAST ? at.outer : at.middle, q = LAST ? at.middle : at.inner;
    int h = p * g.stride_h - g.pad_h, w = q * g.stride_w - g.pad_w;
    const Clip rows = clip(h, g.R, g.dilation_h, g.H), columns = clip(w, g.S, g.dilation_w, g.W);
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float best[V];
        int tap[V];
        search_together<T, V, PACKS>(x + n * sx.n + (i64)c * sx.c, h, w, rows, columns, c < g.C, team, found, g, sx,
                                     best, tap);
        if (c >= g.C || team.lane) continue;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (tap[v] >= 0)
                tap[v] = (rows.first + tap[v] / columns.count) * g.S + columns.first + tap[v] % columns.count;
        store_maximum<T, V>(y, index, n * sy.n + c * sy.c + p * sy.h + q * sy.w, best, tap, relu);
    }
}

// Large windows side by side, of dilation 1 and without an index: whoever searches a window writes the pixels from its
// first one to the next window's, and those behind the last window. No pixel is before the first.
template <typename T, int V, bool LAST, int PACKS>
__device__ __forceinline__ void max_pool_backward_large(const T* dy, const T* x, T* dx, int N, Pool g, Split split,
                                                        u32 count, int warps, Strides sx, Strides sy) {
    __shared__ Found<V, PACKS> found;
    const Team team = team_of<PACKS>(warps);
    if (team.window >= count) return;
    Place at = place(team.window, split);
    int c = LAST ? (at.inner * PACKS + threadIdx.x % PACKS) * V : at.outer;
    int p = LAST ? at.outer : at.middle, q = LAST ? at.middle : at.inner;
    int h = p * g.stride_h - g.pad_h, w = q * g.stride_w - g.pad_w;
    const Clip rows = clip(h, g.R, 1, g.H), columns = clip(w, g.S, 1, g.W);
    int top = min(max(h, 0), g.H), bottom = p == g.P - 1 ? g.H : min(max(h + g.stride_h, 0), g.H);
    int left = min(max(w, 0), g.W), right = q == g.Q - 1 ? g.W : min(max(w + g.stride_w, 0), g.W);
    const int width = right - left, area = c < g.C ? (bottom - top) * width : 0;
    for (int n = blockIdx.y; n < N; n += gridDim.y) {
        float best[V];
        int chosen[V];
        search_together<T, V, PACKS>(x + n * sx.n + (i64)c * sx.c, h, w, rows, columns, c < g.C, team, found, g, sx,
                                     best, chosen);
        if (!area) continue;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (chosen[v] >= 0)
                chosen[v] = (h + rows.first + chosen[v] / columns.count - top) * width + w + columns.first +
                            chosen[v] % columns.count - left;
        Pack<T, V> gradient = load<T, V>(dy + n * sy.n + c * sy.c + p * sy.h + q * sy.w);
        T* target = dx + n * sx.n + (i64)c * sx.c + top * sx.h + left * sx.w;
        for (int pixel = team.lane; pixel < area; pixel += team.lanes) {
            const int row = pixel / width;
            Pack<T, V> result;
#pragma unroll
            for (int v = 0; v < V; v++) result.v[v] = pixel == chosen[v] ? gradient.v[v] : from_float<T>(0.0f);
            store<T, V>(target + (width == g.W ? pixel * sx.w : row * sx.h + (pixel - row * width) * sx.w), result);
        }
    }
}

// Entry points: <function>_<layout>_<type>.
#define MAX_POOL_LARGE(T, V, LAYOUT, LAST, PACKS, VARIANT)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_forward_large_##LAYOUT##_##VARIANT(                  \
        const T* x, T* y, i8* index, int N, Pool g, Split split, u32 count, int warps, Strides sx, Strides sy, int relu) {\
        max_pool_forward_large<T, V, LAST, PACKS>(x, y, index, N, g, split, count, warps, sx, sy, relu);                \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) max_pool_backward_large_##LAYOUT##_##VARIANT(                 \
        const T* dy, const T* x, T* dx, int N, Pool g, Split split, u32 count, int warps, Strides sx, Strides sy) {     \
        max_pool_backward_large<T, V, LAST, PACKS>(dy, x, dx, N, g, split, count, warps, sx, sy);                       \
    }
MAX_POOL_LARGE(float, 4, nhwc, true, 4, f32x4)
MAX_POOL_LARGE(float, 1, nhwc, true, 4, f32)
MAX_POOL_LARGE(bf16, 8, nhwc, true, 4, bf16x8)
MAX_POOL_LARGE(bf16, 1, nhwc, true, 4, bf16)
MAX_POOL_LARGE(float, 1, nchw, false, 1, f32)
MAX_POOL_LARGE(bf16, 1, nchw, false, 1, bf16)
