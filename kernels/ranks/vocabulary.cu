// A CTA a row, where a row of logits is read.
#include "kernels/common/matrix.cuh"
#include "kernels/ranks/vocabulary.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kIgnore = -100;

unsigned ctas_of(std::int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }
__device__ std::int64_t index() { return blockIdx.x * std::int64_t{kThreads} + threadIdx.x; }

__global__ void __launch_bounds__(kThreads) local_ids_kernel(Matrix ids, std::int64_t first, std::int64_t count, Matrix to) {
  const std::int64_t i = index();
  if (i >= to.rows) return;
  const std::int64_t id = load_index(ids, i, 0), at = id - first;
  store_index(to, i, 0, id == kIgnore ? kIgnore : at >= 0 && at < count ? at : -1);
}

__global__ void __launch_bounds__(kThreads) parts_kernel(Matrix logits, Matrix labels, VocabularyParts parts) {
  __shared__ float tops[kThreads / 32], sums[kThreads / 32];
  const std::int64_t r = blockIdx.x;
  float top = -INFINITY, sum = 0.0f;
  for (std::int64_t c = threadIdx.x; c < logits.cols; c += kThreads) {
    const float x = load_value(logits, r, c), most = fmaxf(top, x);
    if (most == -INFINITY) { // -inf, or NaN, which fmaxf passes over
      if (x != -INFINITY) sum += x;
      continue;
    }
    sum = sum * expf(top - most) + expf(x - most);
    top = most;
  }
  auto add = [&](float other_top, float other_sum) {
    const float most = fmaxf(top, other_top);
    if (most == -INFINITY) { // 0, or NaN where one was met
      sum += other_sum;
      return;
    }
    sum = sum * expf(top - most) + other_sum * expf(other_top - most);
    top = most;
  };
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other_top = __shfl_xor_sync(~0u, top, mask), other_sum = __shfl_xor_sync(~0u, sum, mask);
    add(other_top, other_sum);
  }
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top, sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  top = tops[0], sum = sums[0];
  for (int w = 1; w < kThreads / 32; ++w) add(tops[w], sums[w]);
  const std::int64_t label = load_index(labels, r, 0);
  parts.top[r] = top;
  parts.sum[r] = sum;
  parts.label[r] = label >= 0 ? load_value(logits, r, label) : 0.0f;
}

__global__ void __launch_bounds__(kThreads) rescale_kernel(const float* own, VocabularyParts parts, std::int64_t rows) {
  if (const std::int64_t i = index(); i < rows) parts.sum[i] *= expf(own[i] - parts.top[i]);
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const float* gathered, int ranks, std::int64_t rows, VocabularyParts parts) {
  const std::int64_t i = index();
  if (i >= rows) return;
  float top = -INFINITY, sum = 0.0f, label = 0.0f;
  for (int r = 0; r < ranks; ++r) top = fmaxf(top, gathered[3 * r * rows + i]);
  for (int r = 0; r < ranks; ++r) {
    sum += gathered[(3 * r + 1) * rows + i] * expf(gathered[3 * r * rows + i] - top);
    label += gathered[(3 * r + 2) * rows + i];
  }
  parts.top[i] = top;
  parts.sum[i] = sum;
  parts.label[i] = label;
}

__global__ void __launch_bounds__(kThreads) loss_kernel(const __grid_constant__ VocabularyLossParams p) {
  const std::int64_t r = blockIdx.x, label = load_index(p.labels, r, 0);
  const bool ignored = label == kIgnore;
  const float top = p.parts.top[r], log_sum = logf(p.parts.sum[r]), lse = top + log_sum;
  if (threadIdx.x == 0) {
    if (p.loss.data) store_value(p.loss, r, 0, ignored ? 0.0f : (top - p.parts.label[r]) + log_sum);
    if (p.lse.data) store_value(p.lse, r, 0, lse);
    if (p.mask.data) store_index(p.mask, r, 0, ignored);
    if (p.label_ids.data) store_index(p.label_ids, r, 0, ignored ? 0 : label);
  }
  if (p.softmax.data == nullptr && p.gradient.data == nullptr) return;
  for (std::int64_t c = threadIdx.x; c < p.logits.cols; c += kThreads) {
    const float s = expf(load_value(p.logits, r, c) - lse);
    if (p.softmax.data) store_value(p.softmax, r, c, s);
    if (p.gradient.data) store_value(p.gradient, r, c, ignored ? 0.0f : s - (c == label ? 1.0f : 0.0f));
  }
}

} // namespace

void local_ids(const Matrix& ids, std::int64_t first, std::int64_t count, const Matrix& to, const LaunchContext& context) {
  if (to.rows == 0) return;
  local_ids_kernel<<<ctas_of(to.rows), kThreads, 0, context.stream>>>(ids, first, count, to);
  check_launch("local_ids_kernel");
}

void vocabulary_parts(const Matrix& logits, const Matrix& labels, const VocabularyParts& parts, const LaunchContext& context) {
  if (logits.rows == 0) return;
  parts_kernel<<<static_cast<unsigned>(logits.rows), kThreads, 0, context.stream>>>(logits, labels, parts);
  check_launch("vocabulary parts_kernel");
}

void vocabulary_rescale(const float* own, const VocabularyParts& parts, std::int64_t rows, const LaunchContext& context) {
  if (rows == 0) return;
  rescale_kernel<<<ctas_of(rows), kThreads, 0, context.stream>>>(own, parts, rows);
  check_launch("vocabulary rescale_kernel");
}

void vocabulary_merge(const float* gathered, int ranks, std::int64_t rows, const VocabularyParts& parts, const LaunchContext& context) {
  if (rows == 0) return;
  merge_kernel<<<ctas_of(rows), kThreads, 0, context.stream>>>(gathered, ranks, rows, parts);
  check_launch("vocabulary merge_kernel");
}

void vocabulary_loss(const VocabularyLossParams& p, const LaunchContext& context) {
  if (p.labels.rows == 0) return;
  loss_kernel<<<static_cast<unsigned>(p.labels.rows), kThreads, 0, context.stream>>>(p);
  check_launch("vocabulary loss_kernel");
}

} // namespace gdn::kernels
