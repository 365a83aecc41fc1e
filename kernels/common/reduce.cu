#include "kernels/common/reduce.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

// 32 columns by 8 strided runs of parts.
__global__ void __launch_bounds__(256)
    sum_parts_kernel(const float* parts, std::int64_t count, std::int64_t width, float* out) {
  __shared__ double sums[8][32];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const std::int64_t column = blockIdx.x * std::int64_t{32} + lane;
  double sum = 0;
  if (column < width)
    for (std::int64_t p = run; p < count; p += 8) sum += parts[p * width + column];
  sums[run][lane] = sum;
  __syncthreads();
  if (run != 0 || column >= width) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  out[column] += static_cast<float>(sum);
}

// A CTA sums a range of rows of 32 N columns.
template <int N>
__global__ void __launch_bounds__(256)
    column_sums_kernel(Matrix x, Matrix weight, std::int64_t parts, float* out) {
  __shared__ float sums[8][32 * N];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const std::int64_t column = (blockIdx.x * std::int64_t{32} + lane) * N, part = blockIdx.y;
  const std::int64_t first = part * x.rows / parts, end = (part + 1) * x.rows / parts;
  float sum[N] = {};
  if (column < x.cols)
    for (std::int64_t r = first + run; r < end; r += 8) {
      const Values<N> v = load_values<N>(x, r, column);
      const float w = weight.data ? load_value(weight, r, 0) : 1.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += w * v.x[i];
    }
#pragma unroll
  for (int i = 0; i < N; ++i) sums[run][lane * N + i] = sum[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * N; i += 256) {
    const std::int64_t c = blockIdx.x * std::int64_t{32} * N + i;
    if (c >= x.cols) continue;
    float total = 0.0f;
    for (int j = 0; j < 8; ++j) total += sums[j][i];
    out[part * x.cols + c] = total;
  }
}

__device__ double block_sum_double(double x) {
  __shared__ double sums[1024];
  sums[threadIdx.x] = x;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

__global__ void __launch_bounds__(1024) add_sum_kernel(Matrix x, double factor, double* out) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < x.rows; i += 1024) sum += load_value(x, i, 0);
  sum = block_sum_double(sum);
  if (threadIdx.x == 0) *out += factor * sum;
}

// `vector`: x is aligned to 16 bytes; a rank's share of a gradient need not be.
__global__ void __launch_bounds__(256) squares_kernel(const float* x, std::int64_t n, bool vector, double* parts) {
  double sum = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * 256, four = vector ? n / 4 : 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < four; i += step) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    sum += static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y + static_cast<double>(v.z) * v.z +
           static_cast<double>(v.w) * v.w;
  }
  for (std::int64_t i = four * 4 + blockIdx.x * std::int64_t{256} + threadIdx.x; i < n; i += step) sum += static_cast<double>(x[i]) * x[i];
  sum = block_sum_double(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) total_kernel(const double* parts, double* out) {
  const double sum = block_sum_double(parts[threadIdx.x]);
  if (threadIdx.x == 0) *out = sum;
}

} // namespace

void sum_parts(const float* parts, std::int64_t count, std::int64_t width, float* out, const LaunchContext& context) {
  sum_parts_kernel<<<static_cast<unsigned>((width + 31) / 32), 256, 0, context.stream>>>(parts, count, width, out);
  check_launch("sum_parts_kernel");
}

void column_sums(const Matrix& x, const Matrix& weight, float* out, const LaunchContext& context) {
  if (x.rows == 0) return;
  require_scratch(context, column_sums_scratch(x.rows, x.cols), "column_sums");
  const std::int64_t parts = column_sum_parts(x.rows);
  auto* scratch = static_cast<float*>(context.scratch);
  const auto launch = [&](auto kernel, std::int64_t width) {
    const dim3 grid(static_cast<unsigned>((x.cols + width - 1) / width), static_cast<unsigned>(parts));
    kernel<<<grid, 256, 0, context.stream>>>(x, weight, parts, scratch);
  };
  if (vector_matrices({x})) launch(column_sums_kernel<8>, 256);
  else launch(column_sums_kernel<1>, 32);
  check_launch("column_sums_kernel");
  sum_parts(scratch, parts, x.cols, out, context);
}

void add_sum(const Matrix& x, double factor, double* out, const LaunchContext& context) {
  add_sum_kernel<<<1, 1024, 0, context.stream>>>(x, factor, out);
  check_launch("add_sum_kernel");
}

void sum_of_squares(const float* x, std::int64_t n, double* out, const LaunchContext& context) {
  require_scratch(context, kSquareParts * std::int64_t{8}, "sum_of_squares");
  auto* parts = static_cast<double*>(context.scratch);
  squares_kernel<<<kSquareParts, 256, 0, context.stream>>>(x, n, reinterpret_cast<std::uintptr_t>(x) % 16 == 0, parts);
  check_launch("squares_kernel");
  total_kernel<<<1, 1024, 0, context.stream>>>(parts, out);
  check_launch("total_kernel");
}

} // namespace gdn::kernels
