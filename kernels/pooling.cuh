// Max-pooling, forward and backward.
//
// Max-pooling saves one byte per window: the tap r * S + s of the maximum, or -1 where the ReLU that the layer below
// fused gives no gradient (maximum <= 0). Backward is then a gather that reads dY and the index once and writes dX
// once, without atomics and without X or Y. Without an index (the paper's graph; windows of more than 127 taps)
// backward finds the maximum in X again.

struct Pool {
    int C, H, W, P, Q;                // channels, input rows and columns, output rows and columns
    int R, S;                         // window
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// The first maximum in row-major order wins; a NaN wins over everything before it. Where there is something BEFORE, `at`
// is a tap; else it may be -1: nothing considered yet.
template <typename T, int V, bool BEFORE>
__device__ __forceinline__ void consider(const Pack<T, V>& x, int tap, float* best, int* at) {
#pragma unroll
    for (int v = 0; v < V; v++) {
        float value = to_float(x.v[v]);
        if (value > best[v] || value != value || (!BEFORE && at[v] < 0)) {
            best[v] = value;
            at[v] = tap;
        }
    }
}

template <typename T, int V>
__device__ __forceinline__ void store_maximum(T* y, i8* index, i64 offset, float* best, int* at, int relu) {
    Pack<T, V> value;
    Pack<i8, V> tap;
#pragma unroll
    for (int v = 0; v < V; v++) {
        bool dead = relu && best[v] <= 0.0f && at[v] >= 0;  // of padding alone, -inf is the maximum
        value.v[v] = from_float<T>(dead ? 0.0f : best[v]);
        tap.v[v] = (i8)(dead ? -1 : at[v]);
    }
    store<T, V>(y + offset, value);
    if (index) store<i8, V>(index + offset, tap);
}

// Whether a K x K window of dilation 1 lies inside the image, and K is known.
template <int K> __device__ __forceinline__ bool is_inside(int h, int w, const Pool& g) {
    return K && h >= 0 && w >= 0 && h + K <= g.H && w + K <= g.W;
}

// The maximum of the window whose first tap is row `h`, column `w` of an image, and its tap; -1: there is none inside.
// K = 0: any window and dilation; otherwise a K x K window of dilation 1.
template <typename T, int V, int K>
__device__ __forceinline__ void search(const T* source, int h, int w, const Pool& g, const Strides& sx, bool inside,
                                       float* best, int* tap) {
    const int R = K ? K : g.R, S = K ? K : g.S, dh = K ? 1 : g.dilation_h, dw = K ? 1 : g.dilation_w;
#pragma unroll
    for (int v = 0; v < V; v++) {
        best[v] = -__uint_as_float(INFINITY_BITS);
        tap[v] = -1;
    }
    if (inside) {  // all loads are issued before the first comparison
        Pack<T, V> window[K ? K * K : 1];
#pragma unroll
        for (int t = 0; t < K * K; t++)
            window[t] = load<T, V>(source + (h + t / (K ? K : 1)) * sx.h + (w + t % (K ? K : 1)) * sx.w);
#pragma unroll
        for (int v = 0; v < V; v++) {
            best[v] = to_float(window[0].v[v]);
            tap[v] = 0;
        }
#pragma unroll
        for (int t = 1; t < K * K; t++) consider<T, V, true>(window[t], t, best, tap);
    } else {
        for (int r = 0; r < R; r++) {
            int row = h + r * dh;
            if (row < 0 || row >= g.H) continue;
            for (int s = 0; s < S; s++) {
                int column = w + s * dw;
                if (column < 0 || column >= g.W) continue;
                consider<T, V, false>(load<T, V>(source + row * sx.h + column * sx.w), r * S + s, best, tap);
            }
        }
    }
}

// Taps of K x K windows of stride ST (of V channels): those that forward saved, or from X.
template <typename T, int V, int K, int ST>
__device__ __forceinline__ Pack<i8, V> taps_of(const i8* index, i64 n, int c, int p, int q, const Pool&, const Strides&,
                                               const Strides& sy) {
    return load<i8, V>(index + n * sy.n + (i64)c * sy.c + p * sy.h + q * sy.w);
}
template <typename T, int V, int K, int ST>
__device__ __forceinline__ Pack<i8, V> taps_of(const T* x, i64 n, int c, int p, int q, const Pool& g, const Strides& sx,
                                               const Strides&) {
    const int h = p * ST - g.pad_h, w = q * ST - g.pad_w;
    float best[V];
    int at[V];
    search<T, V, K>(x + n * sx.n + (i64)c * sx.c, h, w, g, sx, is_inside<K>(h, w, g), best, at);
    Pack<i8, V> taps;
#pragma unroll
    for (int v = 0; v < V; v++) taps.v[v] = (i8)at[v];
    return taps;
}

// The ST x ST input pixels whose first window is (th, tw); each window is read once. `saved`: the index or X.
template <typename T, int V, int K, int ST, typename SAVED>
__device__ __forceinline__ void backward_tile(const T* dy, const SAVED* saved, T* dx, i64 n, int c, int th, int tw,
                                              const Pool& g, const Strides& sx, const Strides& sy) {
    const int D = (K - 1) / ST;  // windows that reach into the tile from before it, per direction
    Pack<T, V> gradients[(D + 1) * (D + 1)];
    Pack<i8, V> taps[(D + 1) * (D + 1)];
#pragma unroll
    for (int window = 0; window < (D + 1) * (D + 1); window++) {  // all loads are issued before the first sum
        int p = th - (D - window / (D + 1)), q = tw - (D - window % (D + 1));
        bool there = p >= 0 && q >= 0 && p < g.P && q < g.Q;
        if (there) {
            gradients[window] = load<T, V>(dy + n * sy.n + (i64)c * sy.c + p * sy.h + q * sy.w);
            taps[window] = taps_of<T, V, K, ST>(saved, n, c, p, q, g, sx, sy);
        } else {
#pragma unroll
            for (int v = 0; v < V; v++) {
                gradients[window].v[v] = from_float<T>(0.0f);
                taps[window].v[v] = -1;
            }
        }
    }
    float sum[ST][ST][V];
#pragma unroll
    for (int a = 0; a < ST * ST * V; a++) (&sum[0][0][0])[a] = 0.0f;
#pragma unroll
    for (int window = 0; window < (D + 1) * (D + 1); window++) {
        const int back_h = D - window / (D + 1), back_w = D - window % (D + 1);
#pragma unroll
        for (int a = 0; a < ST; a++)
#pragma unroll
            for (int b = 0; b < ST; b++) {
                const int r = back_h * ST + a, s = back_w * ST + b;
                if (r >= K || s >= K) continue;
#pragma unroll
                for (int v = 0; v < V; v++)
                    if (taps[window].v[v] == r * K + s) sum[a][b][v] += to_float(gradients[window].v[v]);
            }
    }
#pragma unroll
    for (int a = 0; a < ST; a++)
#pragma unroll
        for (int b = 0; b < ST; b++) {
            int h = th * ST - g.pad_h + a, w = tw * ST - g.pad_w + b;
            if (h < 0 || w < 0 || h >= g.H || w >= g.W) continue;
            Pack<T, V> result;
#pragma unroll
            for (int v = 0; v < V; v++) result.v[v] = from_float<T>(sum[a][b][v]);
            store<T, V>(dx + n * sx.n + (i64)c * sx.c + h * sx.h + w * sx.w, result);
        }
}
