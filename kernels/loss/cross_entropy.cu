// A CTA a row.
#include "kernels/common/matrix.cuh"
#include "kernels/loss/cross_entropy.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 512;
constexpr std::int64_t kIgnore = -100;

// Maximum and sum of exponentials above it, of any two parts of a row.
struct Part {
  float top = -INFINITY, sum = 0.0f;
  __device__ void add(const Part& o) {
    const float most = fmaxf(top, o.top);
    if (most == -INFINITY) { // 0, or NaN where one was met
      sum += o.sum;
      return;
    }
    sum = sum * expf(top - most) + o.sum * expf(o.top - most);
    top = most;
  }
};

template <int N>
__device__ Part row_part(const Matrix& logits, std::int64_t r) {
  Part p;
  for (std::int64_t c = threadIdx.x * N; c < logits.cols; c += kThreads * N) {
    const Values<N> x = load_values<N>(logits, r, c);
    float most = p.top;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, x.x[i]);
    if (most == -INFINITY) { // -inf, or NaN, which fmaxf passes over
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (x.x[i] != -INFINITY) p.sum += x.x[i];
      continue;
    }
    float sum = p.sum * expf(p.top - most);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += expf(x.x[i] - most);
    p.top = most;
    p.sum = sum;
  }
  __shared__ Part parts[kThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    Part other;
    other.top = __shfl_xor_sync(~0u, p.top, mask);
    other.sum = __shfl_xor_sync(~0u, p.sum, mask);
    p.add(other);
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = p;
  __syncthreads();
  Part all = parts[0];
  for (int w = 1; w < kThreads / 32; ++w) all.add(parts[w]);
  return all;
}

template <int N>
__global__ void __launch_bounds__(kThreads) cross_entropy_forward_kernel(const __grid_constant__ CrossEntropyForwardParams p) {
  const std::int64_t r = blockIdx.x;
  const Part all = row_part<N>(p.logits, r);
  const float lse = all.top + logf(all.sum);
  const std::int64_t label = load_index(p.labels, r, 0);
  if (threadIdx.x == 0) {
    if (p.loss.data) store_value(p.loss, r, 0, label == kIgnore ? 0.0f : (all.top - load_value(p.logits, r, label)) + logf(all.sum));
    if (p.lse.data) store_value(p.lse, r, 0, lse);
    if (p.mask.data) store_index(p.mask, r, 0, label == kIgnore);
    if (p.label_ids.data) store_index(p.label_ids, r, 0, label == kIgnore ? 0 : label);
  }
  if (p.softmax.data == nullptr && p.gradient.data == nullptr) return;
  __syncthreads(); // the label's logit has been read
  for (std::int64_t c = threadIdx.x * N; c < p.logits.cols; c += kThreads * N) {
    Values<N> x = load_values<N>(p.logits, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] = expf(x.x[i] - lse);
    if (p.softmax.data) store_values<N>(p.softmax, r, c, x);
    if (p.gradient.data == nullptr) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] = label == kIgnore ? 0.0f : x.x[i] - (c + i == label ? 1.0f : 0.0f);
    store_values<N>(p.gradient, r, c, x);
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardParams p) {
  const std::int64_t r = blockIdx.x, label = load_index(p.labels, r, 0);
  const bool ignored = label == kIgnore || (p.mask.data && load_index(p.mask, r, 0) != 0);
  const float scale = ignored ? 0.0f : load_value(p.d_loss, r, 0), lse = p.lse.data ? load_value(p.lse, r, 0) : 0.0f;
  for (std::int64_t c = threadIdx.x * N; c < p.d_logits.to.cols; c += kThreads * N) {
    Values<N> x = load_values<N>(p.softmax.data ? p.softmax : p.logits, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = p.softmax.data ? x.x[i] : expf(x.x[i] - lse);
      x.x[i] = ignored ? 0.0f : scale * (s - (c + i == label ? 1.0f : 0.0f));
    }
    put_values<N>(p.d_logits, r, c, x);
  }
}

} // namespace

void cross_entropy_forward(const CrossEntropyForwardParams& p, const LaunchContext& context) {
  if (p.logits.rows == 0) return;
  const auto kernel = vector_matrices({p.logits, p.softmax, p.gradient}) ? cross_entropy_forward_kernel<8> : cross_entropy_forward_kernel<1>;
  kernel<<<static_cast<unsigned>(p.logits.rows), kThreads, 0, context.stream>>>(p);
  check_launch("cross_entropy_forward_kernel");
}

void cross_entropy_backward(const CrossEntropyBackwardParams& p, const LaunchContext& context) {
  if (p.d_logits.to.rows == 0) return;
  const auto kernel = vector_matrices({p.logits, p.softmax, p.d_logits.to}) ? cross_entropy_backward_kernel<8> : cross_entropy_backward_kernel<1>;
  kernel<<<static_cast<unsigned>(p.d_logits.to.rows), kThreads, 0, context.stream>>>(p);
  check_launch("cross_entropy_backward_kernel");
}

} // namespace gdn::kernels
