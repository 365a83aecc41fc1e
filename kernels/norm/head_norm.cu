// A unit belongs to a warp (up to 256 columns) or to a CTA of 256 threads; a thread holds 8 columns, or
// four times 8. Rotation needs each column's partner: rows pass through shared memory for it.
#include "kernels/common/matrix.cuh"
#include "kernels/common/reduce.h"
#include "kernels/norm/head_norm.h"

namespace gdn::kernels {
namespace {

constexpr int kMaxHalf = 128; // pairs of a head that rotate

// Element (unit, column) of a matrix whose rows are whole heads.
struct Place {
  std::int64_t row, col;
  __device__ Place(const HeadNorm& n, const Matrix& m, std::int64_t unit, int column) {
    const auto dim = static_cast<std::uint32_t>(n.dim);
    const auto head = static_cast<std::uint32_t>(unit) * static_cast<std::uint32_t>(n.span) + static_cast<std::uint32_t>(column) / dim;
    const auto per_row = static_cast<std::uint32_t>(m.cols) / dim;
    row = head / per_row;
    col = head % per_row * dim + static_cast<std::uint32_t>(column) % dim;
  }
};

template <int kThreads>
__device__ __forceinline__ float unit_sum(float x, float (&sums)[8]) {
  if constexpr (kThreads == 32) return lane_sum<32>(x);
  else return block_sum(x, sums);
}
template <int kThreads>
__device__ __forceinline__ void unit_sync() {
  if constexpr (kThreads == 32) __syncwarp();
  else __syncthreads();
}

// Turns per position of every pair, in double: positions go far beyond what fp32 can reduce.
__device__ void fill_turns(const HeadNorm& n, double (&turns)[kMaxHalf]) {
  const double rate = -2.0 / n.rotary * log2(n.theta);
  for (int i = threadIdx.x; i < n.rotary / 2; i += blockDim.x) turns[i] = exp2(rate * i) * 0.15915494309189535;
  __syncthreads();
}

// Cosine and sine of every pair at a unit's token; its heads are all of one token.
template <int kThreads>
__device__ void fill_angles(const HeadNorm& n, const double (&turns)[kMaxHalf], std::int64_t unit, int lane, float2* angles) {
  const std::int32_t position = n.positions[unit * n.span / n.heads];
  for (int i = lane; i < n.rotary / 2; i += kThreads) {
    const double turn = position * turns[i];
    float2 a;
    sincospif(2.0f * static_cast<float>(turn - rint(turn)), &a.y, &a.x);
    angles[i] = a;
  }
}

// Rotates a thread's columns; `staged` holds the unit's row.
__device__ __forceinline__ void rotate(const HeadNorm& n, const float2* angles, const float* staged, int column, bool inverse, float (&v)[8]) {
  const int half = n.rotary / 2, first = column % n.dim; // eight columns lie in one head
  if (first >= n.rotary) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = column + i, in_head = first + i;
    if (in_head >= n.rotary) continue;
    const bool upper = in_head >= half;
    float2 a = angles[upper ? in_head - half : in_head];
    if (upper != inverse) a.y = -a.y; // lower: a cos - b sin; upper: b cos + a sin
    v[i] = v[i] * a.x - staged[upper ? c - half : c + half] * a.y;
  }
}

template <int kThreads, int kVectors>
__global__ void __launch_bounds__(256)
    head_norm_forward_kernel(const __grid_constant__ HeadNorm n, Matrix x, Matrix y, float* rstd_out) {
  extern __shared__ float staging[];
  __shared__ double turns[kMaxHalf];
  __shared__ float2 angles[256 / kThreads][kMaxHalf];
  __shared__ float sums[8];
  constexpr int kGroups = 256 / kThreads;
  const int group = threadIdx.x / kThreads, lane = threadIdx.x % kThreads, width = n.span * n.dim;
  float* const staged = staging + group * width;
  if (n.rotary > 0) fill_turns(n, turns);
  for (std::int64_t unit = blockIdx.x * std::int64_t{kGroups} + group; unit < n.units; unit += std::int64_t{gridDim.x} * kGroups) {
    float v[kVectors][8];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int column = (k * kThreads + lane) * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[k][i] = 0.0f;
      if (column >= width) continue;
      const Place at(n, x, unit, column);
      const Values<8> in = load_values<8>(x, at.row, at.col);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[k][i] = in.x[i];
        sum += in.x[i] * in.x[i];
      }
    }
    if (n.normalise) {
      sum = unit_sum<kThreads>(sum, sums);
      const float rstd = rsqrtf((n.mean ? sum / static_cast<float>(width) : sum) + n.eps);
      if (lane == 0 && rstd_out) rstd_out[unit] = rstd;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column >= width) continue;
        Values<8> w;
        if (n.weight.data) w = load_values<8>(n.weight, 0, column);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[k][i] *= n.weight.data ? rstd * (n.zero_centred ? 1.0f + w.x[i] : w.x[i]) : rstd;
      }
    }
    if (n.rotary > 0) {
      unit_sync<kThreads>(); // the unit before has been read
      fill_angles<kThreads>(n, turns, unit, lane, angles[group]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column >= width) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) staged[column + i] = v[k][i];
      }
      unit_sync<kThreads>();
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int column = (k * kThreads + lane) * 8;
      if (column >= width) continue;
      if (n.rotary > 0) rotate(n, angles[group], staged, column, false, v[k]);
      const Place at(n, y, unit, column);
      Values<8> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) out.x[i] = v[k][i];
      store_values<8>(y, at.row, at.col, out);
    }
  }
}

// parts [CTAs, width]: the CTA's share of the weight gradient, or null.
template <int kThreads, int kVectors>
__global__ void __launch_bounds__(256)
    head_norm_backward_kernel(const __grid_constant__ HeadNorm n, const __grid_constant__ HeadNormBackward p, float* parts) {
  extern __shared__ float staging[];
  __shared__ double turns[kMaxHalf];
  __shared__ float2 angles[256 / kThreads][kMaxHalf];
  __shared__ float sums[8];
  constexpr int kGroups = 256 / kThreads;
  const int group = threadIdx.x / kThreads, lane = threadIdx.x % kThreads, width = n.span * n.dim;
  float* const staged = staging + group * width;
  float d_weight[kVectors][8] = {};
  if (n.rotary > 0) fill_turns(n, turns);
  for (std::int64_t unit = blockIdx.x * std::int64_t{kGroups} + group; unit < n.units; unit += std::int64_t{gridDim.x} * kGroups) {
    float d[kVectors][8], x[kVectors][8];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int column = (k * kThreads + lane) * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) d[k][i] = x[k][i] = 0.0f;
      if (column >= width) continue;
      const Place at(n, p.dy, unit, column);
      const Values<8> in = load_values<8>(p.dy, at.row, at.col);
#pragma unroll
      for (int i = 0; i < 8; ++i) d[k][i] = in.x[i];
      if (!n.normalise) continue;
      const Place of_x(n, p.x, unit, column);
      const Values<8> raw = load_values<8>(p.x, of_x.row, of_x.col);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[k][i] = raw.x[i];
    }
    if (n.rotary > 0) {
      unit_sync<kThreads>();
      fill_angles<kThreads>(n, turns, unit, lane, angles[group]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column >= width) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) staged[column + i] = d[k][i];
      }
      unit_sync<kThreads>();
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column < width) rotate(n, angles[group], staged, column, true, d[k]);
      }
    }
    if (n.normalise) {
      float rstd;
      if (p.rstd) {
        rstd = p.rstd[unit];
      } else {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kVectors; ++k)
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += x[k][i] * x[k][i];
        sum = unit_sum<kThreads>(sum, sums);
        rstd = rsqrtf((n.mean ? sum / static_cast<float>(width) : sum) + n.eps);
      }
      float along = 0.0f;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column >= width) continue;
        Values<8> w;
        if (n.weight.data) w = load_values<8>(n.weight, 0, column);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!p.normalised) x[k][i] *= rstd;
          d_weight[k][i] += d[k][i] * x[k][i];
          if (n.weight.data) d[k][i] *= n.zero_centred ? 1.0f + w.x[i] : w.x[i];
          along += d[k][i] * x[k][i];
        }
      }
      along = unit_sum<kThreads>(along, sums);
      if (n.mean) along /= static_cast<float>(width);
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
#pragma unroll
        for (int i = 0; i < 8; ++i) d[k][i] = rstd * (d[k][i] - x[k][i] * along);
    }
    if (p.dx.to.data) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int column = (k * kThreads + lane) * 8;
        if (column >= width) continue;
        const Place at(n, p.dx.to, unit, column);
        Values<8> out;
#pragma unroll
        for (int i = 0; i < 8; ++i) out.x[i] = d[k][i];
        put_values<8>(p.dx, at.row, at.col, out);
      }
    }
  }
  if (parts == nullptr) return;
  float* const mine = parts + blockIdx.x * static_cast<std::int64_t>(width);
  if constexpr (kThreads == 256) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int column = (k * kThreads + lane) * 8;
      for (int i = 0; i < 8 && column < width; ++i) mine[column + i] = d_weight[k][i];
    }
  } else {
    __shared__ float warps[kGroups][256];
#pragma unroll
    for (int i = 0; i < 8; ++i) warps[group][lane * 8 + i] = d_weight[0][i];
    __syncthreads();
    if (threadIdx.x < width) {
      float sum = 0.0f;
      for (int g = 0; g < kGroups; ++g) sum += warps[g][threadIdx.x];
      mine[threadIdx.x] = sum;
    }
  }
}

void check(const HeadNorm& n, std::initializer_list<Matrix> matrices, const char* kernel) {
  const int width = n.width();
  bool vectors = n.dim % 8 == 0 && width <= 8192 && n.rotary <= 2 * kMaxHalf && n.rotary <= n.dim;
  for (const Matrix& m : matrices) vectors = vectors && vector_matrices({m}) && (m.data == nullptr || m.cols % n.dim == 0);
  if (!vectors)
    refuse(kernel, {{"columns of a head", n.dim}, {"heads together", n.span}, {"rotated columns", n.rotary}},
           "multiples of 8 in 16-byte aligned rows, at most 8192 columns together and 256 rotated");
}

template <class F>
void dispatch(int width, F&& f) {
  if (width <= 256) f(std::integral_constant<int, 32>(), std::integral_constant<int, 1>());
  else if (width <= 2048) f(std::integral_constant<int, 256>(), std::integral_constant<int, 1>());
  else f(std::integral_constant<int, 256>(), std::integral_constant<int, 4>());
}

std::size_t staging_bytes(const HeadNorm& n) {
  return n.rotary == 0 ? 0 : static_cast<std::size_t>(n.width()) * 4 * (n.width() <= 256 ? 8 : 1);
}

} // namespace

void head_norm_forward(const HeadNorm& n, const Matrix& x, const Matrix& y, float* rstd, const LaunchContext& context) {
  check(n, {x, y, n.weight}, "head_norm_forward");
  if (n.units == 0) return;
  const std::int64_t ctas = n.width() <= 256 ? (n.units + 7) / 8 : n.units;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(ctas, std::int64_t{context.sm_count} * 16));
  dispatch(n.width(), [&](auto threads, auto vectors) {
    head_norm_forward_kernel<threads.value, vectors.value><<<grid, 256, staging_bytes(n), context.stream>>>(n, x, y, rstd);
  });
  check_launch("head_norm_forward_kernel");
}

void head_norm_backward(const HeadNorm& n, const HeadNormBackward& p, const LaunchContext& context) {
  check(n, {p.x, p.dy, p.dx.to, n.weight}, "head_norm_backward");
  if (n.units == 0) return;
  if (p.d_weight) require_scratch(context, head_norm_backward_scratch(n.units, n.width()), "head_norm_backward");
  auto* parts = p.d_weight ? static_cast<float*>(context.scratch) : nullptr;
  const std::int64_t count = head_norm_parts(n.units, n.width());
  dispatch(n.width(), [&](auto threads, auto vectors) {
    head_norm_backward_kernel<threads.value, vectors.value>
        <<<static_cast<unsigned>(count), 256, staging_bytes(n), context.stream>>>(n, p, parts);
  });
  check_launch("head_norm_backward_kernel");
  if (p.d_weight) sum_parts(parts, count, n.width(), p.d_weight, context);
}

} // namespace gdn::kernels
