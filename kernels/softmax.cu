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

// Many rows of up to 32 * LANE values: one warp per row, which stays in registers.
#define LANE 32
template <typename T>
__device__ __forceinline__ void softmax_warp(const T* x, T* y, const i64* labels, const float* class_weight, float* losses,
                                             int rows, Rows r, float smoothing) {
    int row = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= rows) return;
    i64 at = start(row, r), label = losses ? labels[row] : -1;
    float values[LANE];
#pragma unroll
    for (int k = 0; k < LANE; k++)
        values[k] = lane + 32 * k < r.C ? to_float(x[at + (lane + 32 * k) * r.step]) : 0.0f;
    Largest top = {-__uint_as_float(INFINITY_BITS), r.C};
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        Largest one = {values[k], lane + 32 * k};
        if (one.index < r.C) top = larger(top, one);
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        Largest other;
        other.value = __shfl_xor_sync(0xffffffffu, top.value, mask);
        other.index = __shfl_xor_sync(0xffffffffu, top.index, mask);
        top = larger(top, other);
    }
    float sum = 0.0f, weighted = 0.0f, weights = 0.0f, shifted_label = 0.0f;
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        int c = lane + 32 * k;
        if (c >= r.C) break;
        float shifted = values[k] - top.value;
        if (c == label) shifted_label = shifted;
        if (losses && smoothing > 0.0f) {
            float weight = class_weight ? class_weight[c] : 1.0f;
            if (weight != 0.0f) {
                weights += weight;
                weighted += weight * shifted;
            }
        }
        values[k] = expf(shifted);
        sum += values[k];
    }
    sum = warp_sum(sum);
    if (losses) {
        weights = warp_sum(weights);
        weighted = warp_sum(weighted);
        shifted_label = warp_sum(shifted_label);
        if (lane == 0) {
            losses[row] = row_loss(label, r.C, class_weight, logf(sum), shifted_label, smoothing, weights, weighted);
            losses[rows + row] = top.index == label ? 1.0f : 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < LANE; k++)
        if (lane + 32 * k < r.C) y[at + (lane + 32 * k) * r.step] = from_float<T>(values[k] / sum);
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
extern "C" __global__ void __launch_bounds__(THREADS)
    finish_loss(const float* losses, const float* corrects, int count, float* loss, const double* scalars) {
    __shared__ double sums[THREADS], hits[THREADS];
    double sum = 0.0, hit = 0.0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        sum += losses[i];
        if (corrects) hit += corrects[i];
    }
    sums[threadIdx.x] = sum;
    hits[threadIdx.x] = hit;
    for (int half = THREADS / 2; half > 0; half >>= 1) {
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

// Gradient of the mean loss by X, from Y = softmax(X).
template <typename T>
__device__ __forceinline__ void cross_entropy_backward(const T* y, const i64* labels, T* dx, const double* scalars,
                                                       const float* class_weight, int rows, Rows r, float smoothing) {
    __shared__ float slots[32];
    float scale = (float)scalars[1], weights = (float)r.C;
    if (class_weight && smoothing > 0.0f) {
        weights = 0.0f;
        for (int c = threadIdx.x; c < r.C; c += THREADS) weights += class_weight[c];
        weights = block_sum(weights, slots);
    }
    float spread = smoothing / r.C;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = start(row, r), label = labels[row];
        float weight = label < 0 || label >= r.C ? __uint_as_float(NAN_BITS) : class_weight ? class_weight[label] : 1.0f;
        float hard = (1.0f - smoothing) * weight;
        for (int c = threadIdx.x; c < r.C; c += THREADS) {
            float target = (c == label ? hard : 0.0f) + spread * (class_weight ? class_weight[c] : 1.0f);
            float gradient = to_float(y[at + c * r.step]) * (hard + spread * weights) - target;
            dx[at + c * r.step] = from_float<T>(scale * gradient);
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
        softmax_warp_##VARIANT(const T* x, T* y, const i64* labels, const float* class_weight, float* losses, int rows, \
                               Rows r, float smoothing) {                                                               \
        softmax_warp<T>(x, y, labels, class_weight, losses, rows, r, smoothing);                                        \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_thread_##VARIANT(const T* x, T* y, i64 rows, Rows r) {                                                  \
        softmax_thread<T>(x, y, rows, r);                                                                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        softmax_row_backward_##VARIANT(const T* y, const T* dy, T* dx, i64 rows, Rows r) {                              \
        softmax_row_backward<T>(y, dy, dx, rows, r);                                                                    \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        cross_entropy_backward_##VARIANT(const T* y, const i64* labels, T* dx, const double* scalars,                   \
                                         const float* class_weight, int rows, Rows r, float smoothing) {                \
        cross_entropy_backward<T>(y, labels, dx, scalars, class_weight, rows, r, smoothing);                            \
    }
SOFTMAX(float, f32)
SOFTMAX(bf16, bf16)
