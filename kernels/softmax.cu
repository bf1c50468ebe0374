// Softmax over the channels and the cross-entropy loss, forward and backward.

// A row is one sample (and pixel): C values at distance `step`. Row i * inner + j starts at i * outer_step + j * inner_step.
struct Rows {
    i64 outer_step, step, inner_step;
    int inner, C;
};
__device__ __forceinline__ i64 start(i64 row, const Rows& r) {
    return (row / r.inner) * r.outer_step + (row % r.inner) * r.inner_step;
}

struct Largest {
    float value;
    int index;
};
// The larger value, of equal ones the lower index; the first NaN beats everything (as NumPy's argmax).
__device__ __forceinline__ Largest larger(Largest a, Largest b) {
    bool nan_a = a.value != a.value, nan_b = b.value != b.value;
    bool take_b = nan_a ? nan_b && b.index < a.index
                        : nan_b || b.value > a.value || (b.value == a.value && b.index < a.index);
    return take_b ? b : a;
}
__device__ __forceinline__ Largest block_largest(Largest x, Largest* slots) {
    for (int lane = 16; lane > 0; lane >>= 1) {
        Largest other;
        other.value = __shfl_xor_sync(0xffffffffu, x.value, lane);
        other.index = __shfl_xor_sync(0xffffffffu, x.index, lane);
        x = larger(x, other);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = x;
    __syncthreads();
    x = slots[0];
    for (int i = 1; i < THREADS / 32; i++) x = larger(x, slots[i]);
    return x;
}

// Loss of a row whose label has the value `shifted` below the largest; with smoothing, of what it weighs altogether.
__device__ __forceinline__ float row_loss(i64 label, int C, const float* class_weight, float log_sum, float shifted,
                                          float smoothing, float weights, float weighted) {
    if (label < 0 || label >= C) return __uint_as_float(NAN_BITS);  // a label outside 0..C-1 shows as NaN
    float loss = (class_weight ? class_weight[label] : 1.0f) * (1.0f - smoothing);
    if (loss != 0.0f) loss *= log_sum - shifted;
    if (smoothing > 0.0f) loss += smoothing / C * (weights * log_sum - weighted);
    return loss;
}

// One block per row. `losses` (or null): the row's weighted loss, and in losses[rows + row] whether the largest value is
// the label's. y may be x: every thread overwrites only what it alone reads afterwards.
template <typename T>
__device__ __forceinline__ void softmax_row(const T* x, T* y, const i64* labels, const float* class_weight, float* losses,
                                            int rows, Rows r, float smoothing) {
    __shared__ float slots[32];
    __shared__ Largest largest_slots[32];
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = start(row, r);
        Largest top = {-__uint_as_float(INFINITY_BITS), r.C};
        for (int c = threadIdx.x; c < r.C; c += THREADS) {
            Largest one = {to_float(x[at + c * r.step]), c};
            top = larger(top, one);
        }
        top = block_largest(top, largest_slots);
        float sum = 0.0f, weighted = 0.0f, weights = 0.0f;
        for (int c = threadIdx.x; c < r.C; c += THREADS) {
            float shifted = to_float(x[at + c * r.step]) - top.value;
            sum += expf(shifted);
            if (losses && smoothing > 0.0f) {
                float weight = class_weight ? class_weight[c] : 1.0f;
                if (weight != 0.0f) {  // a class of weight 0 counts nothing, not even where its logit is -infinity
                    weights += weight;
                    weighted += weight * shifted;
                }
            }
        }
        sum = block_sum(sum, slots);
        if (losses && smoothing > 0.0f) {
            weights = block_sum(weights, slots);
            weighted = block_sum(weighted, slots);
        }
        if (losses && threadIdx.x == 0) {
            i64 label = labels[row];
            float shifted = label >= 0 && label < r.C ? to_float(x[at + label * r.step]) - top.value : 0.0f;
            losses[row] = row_loss(label, r.C, class_weight, logf(sum), shifted, smoothing, weights, weighted);
            losses[rows + row] = top.index == label ? 1.0f : 0.0f;
        }
        __syncthreads();  // the label's value is read before any thread overwrites it
        for (int c = threadIdx.x; c < r.C; c += THREADS)
            y[at + c * r.step] = from_float<T>(expf(to_float(x[at + c * r.step]) - top.value) / sum);
    }
}

// Many rows of up to 32 * LANE values: one warp per row, which stays in registers, V neighbours per access (V > 1: step 1).
// `losses` (or null): the sum over the block's rows, and in losses[gridDim.x + blockIdx.x] how many are right.
#define LANE 32
template <typename T, int V>
__device__ __forceinline__ void softmax_warp(const T* x, T* y, const i64* labels, const float* class_weight, float* losses,
                                             int rows, Rows r, float smoothing) {
    __shared__ float row_losses[THREADS / 32], row_hits[THREADS / 32];
    const float lowest = -__uint_as_float(INFINITY_BITS);
    int warp = threadIdx.x >> 5, row = blockIdx.x * (THREADS / 32) + warp, lane = threadIdx.x & 31;
    float loss = 0.0f, hit = 0.0f;
    if (row < rows) {
        i64 at = start(row, r), label = losses ? labels[row] : -1;
        bool known = label >= 0 && label < r.C;
        float of_label = known ? to_float(x[at + label * r.step]) : 0.0f;
        Pack<T, V> packs[LANE / V];
#pragma unroll
        for (int k = 0; k < LANE / V; k++) {
            int c = (lane + 32 * k) * V;
            if (c < r.C) packs[k] = load<T, V>(x + at + c * r.step);
        }
        float values[LANE], top = lowest;
#pragma unroll
        for (int k = 0; k < LANE; k++) {  // behind the row: -infinity, which adds nothing
            values[k] = (lane + 32 * (k / V)) * V < r.C ? to_float(packs[k / V].v[k % V]) : lowest;
            top = fmaxf(top, values[k]);  // passes over NaN, which the sum then becomes
        }
        for (int mask = 16; mask > 0; mask >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
        if (known && !(of_label < top)) {  // is it the first largest? The first NaN beats everything (as NumPy's argmax)
            bool nan_label = of_label != of_label;
            float beaten = 0.0f;
#pragma unroll
            for (int k = 0; k < LANE; k++) {
                int c = (lane + 32 * (k / V)) * V + k % V;
                bool nan = values[k] != values[k];
                if (c < label ? nan || (!nan_label && values[k] == of_label) : nan && !nan_label) beaten = 1.0f;
            }
            hit = warp_sum(beaten) == 0.0f ? 1.0f : 0.0f;
        }
        float weighted = 0.0f, weights = 0.0f;
        if (losses && smoothing > 0.0f) {
#pragma unroll
            for (int k = 0; k < LANE; k++) {
                int c = (lane + 32 * (k / V)) * V + k % V;
                float weight = c >= r.C ? 0.0f : class_weight ? class_weight[c] : 1.0f;
                if (weight != 0.0f) {  // a class of weight 0 counts nothing, not even where its logit is -infinity
                    weights += weight;
                    weighted += weight * (values[k] - top);
                }
            }
            weights = warp_sum(weights);
            weighted = warp_sum(weighted);
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < LANE; k++) {
            values[k] = expf(values[k] - top);
            sum += values[k];
        }
        sum = warp_sum(sum);
        if (losses)
            loss = row_loss(label, r.C, class_weight, logf(sum), of_label - top, smoothing, weights, weighted);
        float factor = 1.0f / sum;
#pragma unroll
        for (int k = 0; k < LANE / V; k++) {
            int c = (lane + 32 * k) * V;
#pragma unroll
            for (int v = 0; v < V; v++) packs[k].v[v] = from_float<T>(values[k * V + v] * factor);
            if (c < r.C) store<T, V>(y + at + c * r.step, packs[k]);
        }
    }
    if (!losses) return;
    if (lane == 0) {
        row_losses[warp] = loss;
        row_hits[warp] = hit;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS / 32; i++) {
        loss += row_losses[i];
        hit += row_hits[i];
    }
    losses[blockIdx.x] = loss;
    losses[gridDim.x + blockIdx.x] = hit;
}

// Many rows of few channels (an image of predictions): one thread per row.
template <typename T> __device__ __forceinline__ void softmax_thread(const T* x, T* y, i64 rows, Rows r) {
    i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    i64 at = start(row, r);
    float top = -__uint_as_float(INFINITY_BITS), sum = 0.0f;
    for (int c = 0; c < r.C; c++) {
        float value = to_float(x[at + c * r.step]);
        top = value > top || value != value ? value : top;
    }
    for (int c = 0; c < r.C; c++) sum += expf(to_float(x[at + c * r.step]) - top);
    for (int c = 0; c < r.C; c++) y[at + c * r.step] = from_float<T>(expf(to_float(x[at + c * r.step]) - top) / sum);
}

// dX = Y * (dY - sum of Y * dY)
template <typename T>
__device__ __forceinline__ void softmax_row_backward(const T* y, const T* dy, T* dx, i64 rows, Rows r) {
    __shared__ float slots[32];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = start(row, r);
        float sum = 0.0f;
        for (int c = threadIdx.x; c < r.C; c += THREADS)
            sum += to_float(y[at + c * r.step]) * to_float(dy[at + c * r.step]);
        sum = block_sum(sum, slots);
        for (int c = threadIdx.x; c < r.C; c += THREADS) {
            i64 i = at + c * r.step;
            dx[i] = from_float<T>(to_float(y[i]) * (to_float(dy[i]) - sum));
        }
    }
}

// Adds up what the rows (or blocks) left, in a fixed order. corrects may be null. One block.
#define FINISHERS 1024
extern "C" __global__ void __launch_bounds__(FINISHERS)
    finish_loss(const float* losses, const float* corrects, int count, float* loss, const double* scalars) {
    __shared__ double sums[FINISHERS], hits[FINISHERS];
    double sum = 0.0, hit = 0.0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += FINISHERS) {
        sum += losses[i];
        if (corrects) hit += corrects[i];
    }
    sums[threadIdx.x] = sum;
    hits[threadIdx.x] = hit;
    for (int half = FINISHERS / 2; half > 0; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            hits[threadIdx.x] += hits[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        loss[0] = (float)(sums[0] * scalars[1]);
        loss[1] = (float)hits[0];
    }
}

// Gradient of the mean loss by X, from Y = softmax(X). A row belongs to the blockDim.x threads of one threadIdx.y: a
// warp, or the block. dx may be y.
#define PACKS 4  // loads in flight per thread
template <typename T, int V>
__device__ __forceinline__ void cross_entropy_backward(const T* y, const i64* labels, T* dx, const double* scalars,
                                                       const float* class_weight, int rows, Rows r, float smoothing) {
    __shared__ float slots[32];
    float scale = (float)scalars[1], weights = (float)r.C;
    if (class_weight && smoothing > 0.0f) {  // every row of threads finds the same sum and leaves it in the same slots
        weights = 0.0f;
        for (int c = threadIdx.x; c < r.C; c += blockDim.x) weights += class_weight[c];
        weights = block_sum(weights, slots);
    }
    float spread = smoothing / r.C;
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
        i64 at = start(row, r), label = labels[row];
        float weight = label < 0 || label >= r.C ? __uint_as_float(NAN_BITS) : class_weight ? class_weight[label] : 1.0f;
        float hard = (1.0f - smoothing) * weight, share = hard + spread * weights;
        for (int first = threadIdx.x * V; first < r.C; first += PACKS * blockDim.x * V) {
            Pack<T, V> packs[PACKS];
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                int c = first + k * blockDim.x * V;
                if (c < r.C) packs[k] = load<T, V>(y + at + c * r.step);
            }
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                int c = first + k * blockDim.x * V;
                if (c >= r.C) break;
#pragma unroll
                for (int v = 0; v < V; v++) {
                    float target = (c + v == label ? hard : 0.0f) + spread * (class_weight ? class_weight[c + v] : 1.0f);
                    packs[k].v[v] = from_float<T>(scale * (to_float(packs[k].v[v]) * share - target));
                }
                store<T, V>(dx + at + c * r.step, packs[k]);
            }
        }
    }
}

#define SOFTMAX(T, VARIANT)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_row_##VARIANT(const T* x, T* y, const i64* labels, const float* class_weight, float* losses, int rows,  \
                              Rows r, float smoothing) {                                                                \
        softmax_row<T>(x, y, labels, class_weight, losses, rows, r, smoothing);                                         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_thread_##VARIANT(const T* x, T* y, i64 rows, Rows r) {                                                  \
        softmax_thread<T>(x, y, rows, r);                                                                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_row_backward_##VARIANT(const T* y, const T* dy, T* dx, i64 rows, Rows r) {                              \
        softmax_row_backward<T>(y, dy, dx, rows, r);                                                                    \
    }
SOFTMAX(float, f32)
SOFTMAX(bf16, bf16)

#define SOFTMAX_PACKS(T, V, VARIANT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_warp_##VARIANT(const T* x, T* y, const i64* labels, const float* class_weight, float* losses, int rows, \
                               Rows r, float smoothing) {                                                               \
        softmax_warp<T, V>(x, y, labels, class_weight, losses, rows, r, smoothing);                                     \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        cross_entropy_backward_##VARIANT(const T* y, const i64* labels, T* dx, const double* scalars,                   \
                                         const float* class_weight, int rows, Rows r, float smoothing) {                \
        cross_entropy_backward<T, V>(y, labels, dx, scalars, class_weight, rows, r, smoothing);                         \
    }
SOFTMAX_PACKS(float, 4, f32x4)
SOFTMAX_PACKS(float, 1, f32)
SOFTMAX_PACKS(bf16, 8, bf16x8)
SOFTMAX_PACKS(bf16, 1, bf16)
