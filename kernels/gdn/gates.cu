#include "kernels/common/matrix.cuh"
#include "kernels/common/reduce.h"
#include "kernels/gdn/gates.h"

namespace gdn::kernels {
namespace {

struct DecayParams {
  Matrix f, a_log, dt_bias;
  int key_dim;
  Matrix g;
};
template <int N>
struct Decay {
  DecayParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const float rate = expf(load_value(p.a_log, 0, c / p.key_dim));
    store_value(p.g, r, c, -rate * softplus(load_value(p.f, r, c) + load_value(p.dt_bias, 0, c)));
  }
};

// 32 columns by a range of rows; parts [parts, 2, cols]: sums of dg g and of df.
__global__ void __launch_bounds__(256) decay_backward_kernel(const __grid_constant__ DecayBackwardParams p, std::int64_t parts, float* out) {
  __shared__ float sums[2][8][32];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const std::int64_t c = blockIdx.x * std::int64_t{32} + lane, part = blockIdx.y, rows = p.f.rows, cols = p.f.cols;
  float of_rate = 0.0f, of_bias = 0.0f;
  if (c < cols) {
    const float rate = expf(load_value(p.a_log, 0, c / p.key_dim)), bias = load_value(p.dt_bias, 0, c);
    for (std::int64_t r = part * rows / parts + run; r < (part + 1) * rows / parts; r += 8) {
      const float x = load_value(p.f, r, c) + bias, d = load_value(p.dg, r, c), dx = -rate * sigmoid(x) * d;
      of_rate += -rate * softplus(x) * d;
      of_bias += dx;
      if (p.df.to.data) put_value(p.df, r, c, dx);
    }
  }
  sums[0][run][lane] = of_rate;
  sums[1][run][lane] = of_bias;
  __syncthreads();
  if (run > 1 || c >= cols) return;
  float total = 0.0f;
  for (int i = 0; i < 8; ++i) total += sums[run][i][lane];
  out[(part * 2 + run) * cols + c] = total;
}

// A thread a head: sums [2, cols] to the parameters.
__global__ void decay_parameters_kernel(const float* sums, int heads, int key_dim, float* d_a_log, float* d_dt_bias) {
  const int h = blockIdx.x * blockDim.x + threadIdx.x;
  if (h >= heads) return;
  double sum = 0;
  for (int i = 0; i < key_dim; ++i) sum += sums[h * key_dim + i];
  if (d_a_log) d_a_log[h] += static_cast<float>(sum);
  for (int i = 0; i < key_dim && d_dt_bias; ++i) d_dt_bias[h * key_dim + i] += sums[heads * key_dim + h * key_dim + i];
}

struct SigmoidParams {
  Matrix x;
  float factor;
  Matrix y;
};
template <int N>
struct Sigmoid {
  SigmoidParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> x = load_values<N>(p.x, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] = p.factor * sigmoid(x.x[i]);
    store_values<N>(p.y, r, c, x);
  }
};

struct SigmoidBackwardParams {
  Matrix x;
  float factor;
  Matrix dy;
  Gradient dx;
};
template <int N>
struct SigmoidBackward {
  SigmoidBackwardParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> x = load_values<N>(p.x, r, c);
    Values<N> d = load_values<N>(p.dy, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) d.x[i] *= p.factor * sigmoid(x.x[i]) * sigmoid(-x.x[i]);
    put_values<N>(p.dx, r, c, d);
  }
};

} // namespace

void decay_forward(const Matrix& f, const Matrix& a_log, const Matrix& dt_bias, int key_dim, const Matrix& g, const LaunchContext& context) {
  for_rows<Decay>(DecayParams{f, a_log, dt_bias, key_dim, g}, f.rows, f.cols, false, context, "decay_forward");
}

void decay_backward(const DecayBackwardParams& p, const LaunchContext& context) {
  if (p.f.rows == 0) return;
  require_scratch(context, decay_backward_scratch(p.f.rows, p.f.cols), "decay_backward");
  const std::int64_t parts = decay_parts(p.f.rows), cols = p.f.cols;
  auto* sums = static_cast<float*>(context.scratch);
  auto* const out = sums + 2 * cols;
  const dim3 grid(static_cast<unsigned>((cols + 31) / 32), static_cast<unsigned>(parts));
  decay_backward_kernel<<<grid, 256, 0, context.stream>>>(p, parts, out);
  check_launch("decay_backward_kernel");
  GDN_CUDA(cudaMemsetAsync(sums, 0, static_cast<std::size_t>(8 * cols), context.stream));
  sum_parts(out, parts, 2 * cols, sums, context);
  const int heads = static_cast<int>(cols / p.key_dim);
  decay_parameters_kernel<<<static_cast<unsigned>((heads + 63) / 64), 64, 0, context.stream>>>(sums, heads, p.key_dim, p.d_a_log, p.d_dt_bias);
  check_launch("decay_parameters_kernel");
}

void sigmoid_forward(const Matrix& x, float factor, const Matrix& y, const LaunchContext& context) {
  for_rows<Sigmoid>(SigmoidParams{x, factor, y}, x.rows, x.cols, vector_matrices({x, y}), context, "sigmoid_forward");
}
void sigmoid_backward(const Matrix& x, float factor, const Matrix& dy, const Gradient& dx, const LaunchContext& context) {
  for_rows<SigmoidBackward>(SigmoidBackwardParams{x, factor, dy, dx}, x.rows, x.cols, vector_matrices({x, dy, dx.to}), context,
                            "sigmoid_backward");
}

} // namespace gdn::kernels
