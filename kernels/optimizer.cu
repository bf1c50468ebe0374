// SGD and Adam over all parameters in few launches, gradient accumulation, and the global norm for clipping.
//
// The list of parameters is a kernel argument (constant memory), so a launch needs no table on the device and can be
// captured. A block takes one chunk of one parameter and finds it by bisection.

#define PARAMETERS 80  // per launch: the arguments of a kernel fit 4 KiB
#define CHUNK (THREADS * 16)

struct Parameter {
    float* w;
    const float* dw;
    float *m, *v;
    bf16* copy;
    u32 count, first_block;
};
struct Parameters {
    Parameter list[PARAMETERS];
    int length;
};

__device__ __forceinline__ int find(const Parameters& p, u32 block) {
    int low = 0, high = p.length - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (p.list[middle].first_block <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Calls body.at<V>(index) for the chunk's elements, four at a time where all addresses and the rest allow it.
template <class Body> __device__ __forceinline__ void for_chunk(u32 count, u32 first, bool aligned, Body& body) {
#pragma unroll
    for (int k = 0; k < CHUNK / (THREADS * 4); k++) {
        u32 i = first + (k * THREADS + threadIdx.x) * 4;
        if (aligned && i + 4 <= count)
            body.template at<4>(i);
        else
            for (u32 j = i; j < i + 4 && j < count; j++) body.template at<1>(j);
    }
}
__device__ __forceinline__ bool aligned16(const void* a, const void* b, const void* c, const void* d) {
    return (((u64)a | (u64)b | (u64)c | (u64)d) & 15) == 0;
}

struct Sgd {
    Parameter p;
    float lr, clip, momentum, rest, decay;  // rest = 1 - dampening, rounded once, by the host
    bool first, nesterov, maximize;
    template <int V> __device__ __forceinline__ void at(u32 i) {
        Pack<float, V> w = load<float, V>(p.w + i), dw = load<float, V>(p.dw + i), m;
        if (p.m && !first) m = load<float, V>(p.m + i);
        Pack<bf16, V> copy;
#pragma unroll
        for (int v = 0; v < V; v++) {
            float g = (maximize ? -dw.v[v] : dw.v[v]) * clip + decay * w.v[v];
            if (p.m) {  // the first step's momentum is the gradient itself; the buffer holds nothing yet
                m.v[v] = first ? g : momentum * m.v[v] + rest * g;
                g = nesterov ? g + momentum * m.v[v] : m.v[v];
            }
            w.v[v] -= lr * g;
            copy.v[v] = from_float<bf16>(w.v[v]);
        }
        store<float, V>(p.w + i, w);
        if (p.m) store<float, V>(p.m + i, m);
        if (p.copy) store<bf16, V>(p.copy + i, copy);
    }
};

struct Adam {
    Parameter p;
    float lr, clip, beta2, rest1, rest2, eps, decay, step_size, root;  // rest = 1 - beta
    bool decoupled;
    template <int V> __device__ __forceinline__ void at(u32 i) {
        Pack<float, V> w = load<float, V>(p.w + i), dw = load<float, V>(p.dw + i);
        Pack<float, V> m = load<float, V>(p.m + i), s = load<float, V>(p.v + i);
        Pack<bf16, V> copy;
#pragma unroll
        for (int v = 0; v < V; v++) {
            float g = dw.v[v] * clip;
            if (decoupled)
                w.v[v] *= 1.0f - lr * decay;
            else
                g += decay * w.v[v];
            m.v[v] += rest1 * (g - m.v[v]);
            s.v[v] = beta2 * s.v[v] + rest2 * g * g;
            w.v[v] -= step_size * m.v[v] / (sqrtf(s.v[v]) / root + eps);
            copy.v[v] = from_float<bf16>(w.v[v]);
        }
        store<float, V>(p.w + i, w);
        store<float, V>(p.m + i, m);
        store<float, V>(p.v + i, s);
        if (p.copy) store<bf16, V>(p.copy + i, copy);
    }
};

struct Accumulate {  // w is the total, dw the source
    Parameter p;
    template <int V> __device__ __forceinline__ void at(u32 i) {
        Pack<float, V> total = load<float, V>(p.w + i), source = load<float, V>(p.dw + i);
#pragma unroll
        for (int v = 0; v < V; v++) total.v[v] += source.v[v];
        store<float, V>(p.w + i, total);
    }
};

struct SquareSum {
    Parameter p;
    float sum;
    template <int V> __device__ __forceinline__ void at(u32 i) {
        Pack<float, V> dw = load<float, V>(p.dw + i);
#pragma unroll
        for (int v = 0; v < V; v++) sum += dw.v[v] * dw.v[v];
    }
};

// scalars: 0 learning rate, 2 step (0: first), 6 and 7 Adam's bias corrections. clip: one factor, or null.
extern "C" __global__ void __launch_bounds__(THREADS)
    sgd_update(const Parameters list, const double* scalars, const float* clip, float momentum, float rest, float decay,
               int nesterov, int maximize) {
    Sgd body;
    body.p = list.list[find(list, blockIdx.x)];
    body.lr = (float)scalars[0];
    body.first = scalars[2] == 0.0;
    body.clip = clip ? *clip : 1.0f;
    body.momentum = momentum;
    body.rest = rest;
    body.decay = decay;
    body.nesterov = nesterov != 0;
    body.maximize = maximize != 0;
    bool aligned = aligned16(body.p.w, body.p.dw, body.p.m, body.p.copy);
    for_chunk(body.p.count, (blockIdx.x - body.p.first_block) * CHUNK, aligned, body);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adam_update(const Parameters list, const double* scalars, const float* clip, float beta2, float rest1, float rest2,
                float eps, float decay, int decoupled) {
    Adam body;
    body.p = list.list[find(list, blockIdx.x)];
    body.lr = (float)scalars[0];
    body.step_size = (float)(scalars[0] / scalars[6]);
    body.root = (float)sqrt(scalars[7]);
    body.clip = clip ? *clip : 1.0f;
    body.beta2 = beta2;
    body.rest1 = rest1;
    body.rest2 = rest2;
    body.eps = eps;
    body.decay = decay;
    body.decoupled = decoupled != 0;
    bool aligned = aligned16(body.p.w, body.p.dw, body.p.m, body.p.v) && ((u64)body.p.copy & 15) == 0;
    for_chunk(body.p.count, (blockIdx.x - body.p.first_block) * CHUNK, aligned, body);
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate(const Parameters list) {
    Accumulate body;
    body.p = list.list[find(list, blockIdx.x)];
    for_chunk(body.p.count, (blockIdx.x - body.p.first_block) * CHUNK, aligned16(body.p.w, body.p.dw, 0, 0), body);
}

// Every block leaves the sum of squares of its chunk.
extern "C" __global__ void __launch_bounds__(THREADS) square_sums(const Parameters list, float* parts) {
    __shared__ float slots[32];
    SquareSum body;
    body.p = list.list[find(list, blockIdx.x)];
    body.sum = 0.0f;
    for_chunk(body.p.count, (blockIdx.x - body.p.first_block) * CHUNK, aligned16(body.p.dw, 0, 0, 0), body);
    float sum = block_sum(body.sum, slots);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// clip = min(1, max_norm / (norm + 1e-6)); a NaN norm stays a NaN factor. One block, fixed order.
extern "C" __global__ void __launch_bounds__(1024) clip_factor(const float* parts, int count, float* clip, float max_norm) {
    __shared__ double sums[1024];
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 1024) sum += parts[i];
    sums[threadIdx.x] = sum;
    for (int half = 512; half > 0; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        float factor = max_norm / ((float)sqrt(sums[0]) + 1e-6f);
        *clip = factor > 1.0f ? 1.0f : factor;
    }
}
