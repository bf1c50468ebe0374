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
        bool dead = relu && best[v] <= 0.0f;
        value.v[v] = from_float<T>(dead ? 0.0f : best[v]);
        tap.v[v] = (i8)(dead ? -1 : at[v]);
    }
    store<T, V>(y + offset, value);
    if (index) store<i8, V>(index + offset, tap);
}
