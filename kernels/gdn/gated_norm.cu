// Gated RMSNorm. A row (token, head) belongs to a group of 16 or 32 lanes, 8 columns each.
#include "kernels/common/check.h"
#include "kernels/common/row_vector.cuh"
#include "kernels/gdn/gated_norm.h"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

constexpr int kThreads = 256;
using Vector = RowVector<8>;

// A thread's place: its row and its columns inside the row.
template <int kLanes>
struct Place {
  std::int64_t row, z; // element offsets in o and z
  int column;
  bool active;
  __device__ Place(const GatedNormInputs& in, std::int64_t index) {
    const std::int64_t token = index / in.heads, head = index % in.heads;
    column = threadIdx.x % kLanes * 8;
    active = column < in.width && index < in.tokens * in.heads;
    row = index * in.width + column;
    z = token * in.z_stride + head * in.width + column;
  }
};

template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    gated_norm_forward_kernel(const __grid_constant__ GatedNormForwardParams p, bool vector, bool weight_vector) {
  const GatedNormInputs& in = p.in;
  const std::int64_t index =
      blockIdx.x * static_cast<std::int64_t>(kThreads / kLanes) + threadIdx.x / kLanes;
  const Place<kLanes> at(in, index);
  const Vector o = at.active ? Vector::load(in.o + at.row, true) : Vector::zero();
  const Vector z = at.active ? Vector::load(in.z + at.z, vector) : Vector::zero();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += o.x[i] * o.x[i];
  const float rstd = rsqrtf(lane_sum<kLanes>(sum) / static_cast<float>(in.width) + in.epsilon);
  if (!at.active) return;
  const Vector w = Vector::load(in.weight + at.column, weight_vector);
  Vector y;
#pragma unroll
  for (int i = 0; i < 8; ++i) y.x[i] = w.x[i] * o.x[i] * rstd * z.x[i] * sigmoid(z.x[i]);
  y.store(p.y + at.row, true);
  if (at.column == 0) p.rstd[index] = rstd;
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    gated_norm_backward_kernel(const __grid_constant__ GatedNormBackwardParams p, float* parts,
                               bool vector, bool out_vector, bool weight_vector) {
  __shared__ float sums[kThreads / kLanes][kLanes * 8];
  const GatedNormInputs& in = p.in;
  const std::int64_t rows = in.tokens * in.heads;
  constexpr int kGroups = kThreads / kLanes;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kGroups;
  const int column = threadIdx.x % kLanes * 8;
  const Vector w = column < in.width ? Vector::load(in.weight + column, weight_vector) : Vector::zero();
  float d_weight[8] = {};
  for (std::int64_t base = blockIdx.x * static_cast<std::int64_t>(kGroups); base < rows;
       base += stride) {
    const std::int64_t index = base + threadIdx.x / kLanes;
    const Place<kLanes> at(in, index);
    const std::int64_t z_out = at.z + index / in.heads * (p.dz_stride - in.z_stride);
    Vector o = Vector::zero(), z = o, dy = o;
    float rstd = 0.0f;
    if (at.active) {
      o = Vector::load(in.o + at.row, true);
      z = Vector::load(in.z + at.z, vector);
      dy = Vector::load(p.dy + at.row, true);
      rstd = p.rstd[index];
    }
    Vector e, dz;
    float along = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float s = sigmoid(z.x[i]), gate = z.x[i] * s, normed = o.x[i] * rstd;
      d_weight[i] += dy.x[i] * gate * normed;
      e.x[i] = dy.x[i] * gate * w.x[i];
      dz.x[i] = dy.x[i] * w.x[i] * normed * s * (1.0f + z.x[i] * (1.0f - s));
      along += e.x[i] * normed;
      o.x[i] = normed;
    }
    along = lane_sum<kLanes>(along) / static_cast<float>(in.width);
    if (!at.active) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) e.x[i] = rstd * (e.x[i] - o.x[i] * along);
    e.store(p.d_o + at.row, true);
    dz.store(p.dz + z_out, out_vector);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[threadIdx.x / kLanes][column + i] = d_weight[i];
  __syncthreads();
  for (int i = threadIdx.x; i < in.width; i += kThreads) {
    float sum = 0.0f;
    for (int group = 0; group < kGroups; ++group) sum += sums[group][i];
    parts[blockIdx.x * static_cast<std::int64_t>(in.width) + i] = sum;
  }
}

// Second stage: a block per column; 256 strided sums, then a tree.
__global__ void __launch_bounds__(256)
    gated_norm_weight_kernel(const float* parts, int count, int width, float* d_weight) {
  __shared__ double sums[256];
  double sum = 0;
  for (int part = threadIdx.x; part < count; part += 256)
    sum += parts[static_cast<std::int64_t>(part) * width + blockIdx.x];
  sums[threadIdx.x] = sum;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) d_weight[blockIdx.x] += static_cast<float>(sums[0]);
}

} // namespace

void gated_norm_forward(const GatedNormForwardParams& p, const LaunchContext& context) {
  check_gated_norm(p.in, "gated_norm_forward");
  const int lanes = p.in.width <= 128 ? 16 : 32, rows_per_cta = kThreads / lanes;
  const std::int64_t rows = p.in.tokens * p.in.heads;
  if (rows == 0) return;
  const auto kernel = lanes == 16 ? gated_norm_forward_kernel<16> : gated_norm_forward_kernel<32>;
  kernel<<<static_cast<unsigned>((rows + rows_per_cta - 1) / rows_per_cta), kThreads, 0,
           context.stream>>>(p, vector_rows(p.in.z, p.in.z_stride, 8), vector_rows(p.in.weight, 8, 8));
  check_launch("gated_norm_forward_kernel");
}

void gated_norm_backward(const GatedNormBackwardParams& p, const LaunchContext& context) {
  const GatedNormInputs& in = p.in;
  check_gated_norm(in, "gated_norm_backward");
  check_scratch(context, gated_norm_backward_scratch(in.tokens, in.heads, in.width),
                "gated_norm_backward");
  if (in.tokens == 0) return;
  const auto parts = static_cast<int>(gated_norm_parts(in.tokens, in.heads));
  auto* sums = static_cast<float*>(context.scratch);
  const auto kernel =
      in.width <= 128 ? gated_norm_backward_kernel<16> : gated_norm_backward_kernel<32>;
  kernel<<<static_cast<unsigned>(parts), kThreads, 0, context.stream>>>(
      p, sums, vector_rows(in.z, in.z_stride, 8), vector_rows(p.dz, p.dz_stride, 8), vector_rows(in.weight, 8, 8));
  check_launch("gated_norm_backward_kernel");
  gated_norm_weight_kernel<<<static_cast<unsigned>(in.width), 256, 0, context.stream>>>(
      sums, parts, in.width, p.d_weight);
  check_launch("gated_norm_weight_kernel");
}

} // namespace gdn::kernels
