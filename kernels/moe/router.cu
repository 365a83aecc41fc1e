// A warp routes a token: expert e lies in lane e % 32, register e / 32.
#include "kernels/common/matrix.cuh"
#include "kernels/moe/router.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// Logits of a token, -inf past the last expert.
template <int kPerLane>
__device__ __forceinline__ void load_logits(const Matrix& logits, std::int64_t t, int lane, float (&x)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = 32 * i + lane;
    x[i] = e < logits.cols ? load_value(logits, t, e) : -INFINITY;
  }
}

// x becomes its softmax; returns the log-sum-exp.
template <int kPerLane>
__device__ __forceinline__ float softmax(float (&x)[kPerLane]) {
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) top = fmaxf(top, x[i]);
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += expf(x[i] - top);
  sum = lane_sum<32>(sum);
  const float lse = top + logf(sum);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = expf(x[i] - top) / sum;
  return lse;
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) route_forward_kernel(const __grid_constant__ RouteForwardParams p) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(p.logits.cols), k = p.route.top_k;
  const std::int64_t t = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / 32;
  if (t >= p.logits.rows) return;
  float x[kPerLane], s[kPerLane];
  load_logits(p.logits, t, lane, x);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) s[i] = x[i];
  softmax(s);

  std::uint32_t chosen = 0; // bit i: register i
  int mine = 0;             // expert of slot `lane`
  for (int j = 0; j < k; ++j) {
    int best = experts;
    if (p.route.balanced) {
      best = static_cast<int>((t * k + j) % experts);
    } else {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int e = 32 * i + lane;
        const bool open = e < experts && (chosen >> i & 1) == 0;
        if (open && (best == experts || x[i] > value)) {
          best = e;
          value = x[i];
        }
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        const int other = __shfl_xor_sync(~0u, best, mask);
        const float its = __shfl_xor_sync(~0u, value, mask);
        const bool take = other < experts && (best == experts || its > value || (its == value && other < best));
        if (take) {
          best = other;
          value = its;
        }
      }
      best = __shfl_sync(~0u, best, 0); // one answer, whatever NaN compares to
    }
    if (best % 32 == lane) chosen |= 1u << best / 32;
    if (lane == j) mine = best;
  }

  // Weights: s over the sum of the chosen, or s as it is.
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (chosen >> i & 1) sum += s[i];
  sum = p.route.renormalise ? lane_sum<32>(sum) : 1.0f;
  if (p.route.renormalise && sum < 1e-20f) { // all chosen scores vanish beside one that was not chosen
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (chosen >> i & 1) top = fmaxf(top, x[i]);
    top = warp_max(top);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (chosen >> i & 1) sum += expf(x[i] - top);
    sum = lane_sum<32>(sum);
    for (int i = 0; i < kPerLane; ++i) s[i] = chosen >> i & 1 ? expf(x[i] - top) : s[i];
  }
  float weight = 0.0f; // of slot `lane`
  for (int j = 0; j < k; ++j) {
    const int e = __shfl_sync(~0u, mine, j);
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i == e / 32) value = s[i];
    value = __shfl_sync(~0u, value, e % 32) / sum;
    if (lane == j) weight = value;
  }
  if (lane < k) {
    if (p.weights.data) store_value(p.weights, t, lane, weight);
    for (const Matrix& m : p.experts)
      if (m.data) store_index(m, t, lane, mine);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = 32 * i + lane;
    if (e >= experts) continue;
    for (const Matrix& m : p.scores)
      if (m.data) store_value(m, t, e, s[i]);
    if (p.probs.data) store_value(p.probs, t, e, chosen >> i & 1 ? s[i] / sum : 0.0f);
    if (p.map.data) store_index(p.map, t, e, chosen >> i & 1);
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(const __grid_constant__ RouteBackwardParams p) {
  const int lane = threadIdx.x % 32, experts = static_cast<int>(p.d_logits.to.cols), k = p.route.top_k;
  const std::int64_t t = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / 32;
  if (t >= p.d_logits.to.rows) return;
  const bool through_weights = p.d_weights.data || p.d_probs.data;
  float s[kPerLane] = {}, d[kPerLane] = {}, lse = 0.0f;
  if (p.scores.data) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) s[i] = 32 * i + lane < experts ? load_value(p.scores, t, 32 * i + lane) : 0.0f;
  }
  if (p.logits.data) {
    float x[kPerLane];
    load_logits(p.logits, t, lane, x);
    lse = softmax(x);
    if (!p.scores.data) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) s[i] = x[i];
    }
  }
  if (through_weights) {
    // Slot j in lane j: its expert, weight, and gradient.
    int expert = 0;
    float w = 0.0f, dw = 0.0f;
    if (lane < k) {
      expert = static_cast<int>(load_index(p.experts, t, lane));
      dw = p.d_weights.data ? load_value(p.d_weights, t, lane) : load_value(p.d_probs, t, expert);
      if (p.route.renormalise) w = load_value(p.weights, t, lane);
    }
    if (!p.route.renormalise) {
      for (int j = 0; j < k; ++j) {
        const int e = __shfl_sync(~0u, expert, j);
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
          if (i == e / 32) value = s[i];
        value = __shfl_sync(~0u, value, e % 32);
        if (lane == j) w = value;
      }
    }
    const float dot = lane_sum<32>(w * dw);
    const float of_slot = w * (p.route.renormalise ? dw - dot : dw);
    if (!p.route.renormalise) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) d[i] = -s[i] * dot;
    }
    for (int j = 0; j < k; ++j) {
      const int e = __shfl_sync(~0u, expert, j);
      const float value = __shfl_sync(~0u, of_slot, j);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (32 * i + lane == e) d[i] += value;
    }
  }
  if (p.balance != 0.0f) {
    float mean = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (32 * i + lane < experts) mean += s[i] * static_cast<float>(p.counts[32 * i + lane]);
    mean = lane_sum<32>(mean);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (32 * i + lane < experts) d[i] += p.balance * s[i] * (static_cast<float>(p.counts[32 * i + lane]) - mean);
  }
  if (p.z != 0.0f) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) d[i] += p.z * lse * s[i];
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (32 * i + lane < experts) put_value(p.d_logits, t, 32 * i + lane, d[i]);
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    route_losses_kernel(Matrix logits, const std::int32_t* counts, float balance, float z, Matrix losses) {
  const int lane = threadIdx.x % 32;
  const std::int64_t t = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / 32;
  if (t >= logits.rows) return;
  float x[kPerLane];
  load_logits(logits, t, lane, x);
  const float lse = softmax(x);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (32 * i + lane < logits.cols) sum += x[i] * static_cast<float>(counts[32 * i + lane]);
  sum = lane_sum<32>(sum);
  if (lane == 0) store_value(losses, t, 0, balance * sum + z * lse * lse);
}

void check(const Route& r, std::int64_t experts, const char* kernel) {
  if (experts < 1 || experts > kMaxRouted || r.top_k > kMaxTopK || r.top_k > experts)
    refuse(kernel, {{"experts", experts}, {"chosen", r.top_k}}, "up to 1024 experts and 32 chosen of them");
}

template <class F>
void dispatch(std::int64_t experts, F&& f) {
  if (experts <= 256) f(std::integral_constant<int, 8>());
  else f(std::integral_constant<int, 32>());
}
unsigned ctas(std::int64_t tokens) { return static_cast<unsigned>((tokens * 32 + kThreads - 1) / kThreads); }

} // namespace

void route_forward(const RouteForwardParams& p, const LaunchContext& context) {
  check(p.route, p.logits.cols, "route_forward");
  if (p.logits.rows == 0) return;
  dispatch(p.logits.cols, [&](auto n) { route_forward_kernel<n.value><<<ctas(p.logits.rows), kThreads, 0, context.stream>>>(p); });
  check_launch("route_forward_kernel");
}

void route_backward(const RouteBackwardParams& p, const LaunchContext& context) {
  const Matrix& d = p.d_logits.to;
  check(p.route, d.cols, "route_backward");
  if (d.rows == 0) return;
  dispatch(d.cols, [&](auto n) { route_backward_kernel<n.value><<<ctas(d.rows), kThreads, 0, context.stream>>>(p); });
  check_launch("route_backward_kernel");
}

void route_losses(const Matrix& logits, const std::int32_t* counts, float balance, float z, const Matrix& losses,
                  const LaunchContext& context) {
  check({}, logits.cols, "route_losses");
  if (logits.rows == 0) return;
  dispatch(logits.cols, [&](auto n) {
    route_losses_kernel<n.value><<<ctas(logits.rows), kThreads, 0, context.stream>>>(logits, counts, balance, z, losses);
  });
  check_launch("route_losses_kernel");
}

} // namespace gdn::kernels
