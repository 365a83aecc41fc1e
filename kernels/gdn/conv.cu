#include "kernels/gdn/conv.h"

#include "kernels/common/matrix.cuh"
#include "kernels/common/reduce.h"

namespace gdn::kernels {
namespace {

// Taps and bias of N channels.
template <int N>
struct Taps {
  float w[N][kConvTaps], bias[N];
  __device__ Taps(const Conv& p, std::int64_t c) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < kConvTaps; ++j) w[i][j] = load_value(p.weight, c + i, j);
      bias[i] = p.bias.data ? load_value(p.bias, 0, c + i) : 0.0f;
    }
  }
};

// Row t of x, zeros when it is not one of the `back` tokens before a token at `position`.
template <int N>
__device__ Values<N> row_before(const Conv& p, std::int64_t t, int back, std::int64_t position, std::int64_t c) {
  if (back <= position) return load_values<N>(p.x, t - back, c);
  Values<N> zero;
#pragma unroll
  for (int i = 0; i < N; ++i) zero.x[i] = 0.0f;
  return zero;
}

struct ForwardParams {
  Conv conv;
  Matrix y;
};
template <int N>
struct Forward {
  ForwardParams p;
  __device__ void operator()(std::int64_t t, std::int64_t c) const {
    const Taps<N> taps(p.conv, c);
    const std::int64_t position = p.conv.positions[t];
    Values<N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.x[i] = taps.bias[i];
#pragma unroll
    for (int back = 0; back < kConvTaps; ++back) {
      const Values<N> x = row_before<N>(p.conv, t, back, position, c);
#pragma unroll
      for (int i = 0; i < N; ++i) y.x[i] += taps.w[i][kConvTaps - 1 - back] * x.x[i];
    }
    if (p.conv.silu) {
#pragma unroll
      for (int i = 0; i < N; ++i) y.x[i] *= sigmoid(y.x[i]);
    }
    store_values<N>(p.y, t, c, y);
  }
};

// 32 N channels by a range of tokens. Token t's thread makes the gradients of the pre-activations of t .. t + 3 for
// dx, and keeps its own for the weights. parts [parts, C, 5]: four taps and the bias.
template <int N>
__global__ void __launch_bounds__(256)
    conv_backward_kernel(const __grid_constant__ Conv p, Matrix dy, Gradient dx, std::int64_t parts, float* out) {
  __shared__ float sums[8][32 * N];
  const int lane = threadIdx.x % 32, run = threadIdx.x / 32;
  const std::int64_t c = (blockIdx.x * std::int64_t{32} + lane) * N, part = blockIdx.y, rows = p.x.rows, channels = p.x.cols;
  float d_weight[N][kConvTaps + 1] = {};
  if (c < channels) {
    const Taps<N> taps(p, c);
    for (std::int64_t t = part * rows / parts + run; t < (part + 1) * rows / parts; t += 8) {
      const std::int64_t position = p.positions[t];
      Values<N> d_x;
#pragma unroll
      for (int i = 0; i < N; ++i) d_x.x[i] = 0.0f;
#pragma unroll
      for (int ahead = 0; ahead < kConvTaps; ++ahead) { // tap 3 - ahead of token t + ahead reads token t
        const std::int64_t at = t + ahead;
        if (at >= rows || p.positions[at] != position + ahead) break;
        const Values<N> d = load_values<N>(dy, at, c);
        Values<N> pre, x[kConvTaps];
#pragma unroll
        for (int i = 0; i < N; ++i) pre.x[i] = taps.bias[i];
#pragma unroll
        for (int back = 0; back < kConvTaps; ++back) {
          x[back] = row_before<N>(p, at, back, position + ahead, c);
#pragma unroll
          for (int i = 0; i < N; ++i) pre.x[i] += taps.w[i][kConvTaps - 1 - back] * x[back].x[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float s = sigmoid(pre.x[i]), slope = p.silu ? s * (1.0f + pre.x[i] * (1.0f - s)) : 1.0f, d_pre = d.x[i] * slope;
          d_x.x[i] += taps.w[i][kConvTaps - 1 - ahead] * d_pre;
          if (ahead > 0) continue;
#pragma unroll
          for (int back = 0; back < kConvTaps; ++back) d_weight[i][kConvTaps - 1 - back] += d_pre * x[back].x[i];
          d_weight[i][kConvTaps] += d_pre;
        }
      }
      if (dx.to.data) put_values<N>(dx, t, c, d_x);
    }
  }
#pragma unroll
  for (int j = 0; j <= kConvTaps; ++j) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) sums[run][lane * N + i] = d_weight[i][j];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * N; i += 256) {
      const std::int64_t channel = blockIdx.x * std::int64_t{32} * N + i;
      if (channel >= channels) continue;
      float total = 0.0f;
      for (int k = 0; k < 8; ++k) total += sums[k][i];
      out[(part * channels + channel) * (kConvTaps + 1) + j] = total;
    }
  }
}

__global__ void conv_parameters_kernel(const float* sums, std::int64_t channels, float* d_weight, float* d_bias) {
  const std::int64_t c = blockIdx.x * std::int64_t{256} + threadIdx.x;
  if (c >= channels) return;
  for (int j = 0; j < kConvTaps && d_weight; ++j) d_weight[c * kConvTaps + j] += sums[c * (kConvTaps + 1) + j];
  if (d_bias) d_bias[c] += sums[c * (kConvTaps + 1) + kConvTaps];
}

void check(const Conv& p, const char* kernel) {
  if (p.weight.cols != kConvTaps || p.weight.rows != p.x.cols)
    refuse(kernel, {{"taps", p.weight.cols}, {"channels", p.x.cols}}, "four taps a channel");
}

} // namespace

void conv_forward(const Conv& p, const Matrix& y, const LaunchContext& context) {
  check(p, "conv_forward");
  for_rows<Forward>(ForwardParams{p, y}, p.x.rows, p.x.cols, vector_matrices({p.x, y}), context, "conv_forward");
}

void conv_backward(const Conv& p, const Matrix& dy, const Gradient& dx, float* d_weight, float* d_bias, const LaunchContext& context) {
  check(p, "conv_backward");
  if (p.x.rows == 0) return;
  const std::int64_t channels = p.x.cols, parts = conv_parts(p.x.rows), width = channels * (kConvTaps + 1);
  require_scratch(context, conv_backward_scratch(p.x.rows, channels), "conv_backward");
  auto* const sums = static_cast<float*>(context.scratch);
  auto* const out = sums + width;
  const auto launch = [&](auto kernel, std::int64_t columns) {
    const dim3 grid(static_cast<unsigned>((channels + columns - 1) / columns), static_cast<unsigned>(parts));
    kernel<<<grid, 256, 0, context.stream>>>(p, dy, dx, parts, out);
  };
  if (vector_matrices({p.x, dy, dx.to})) launch(conv_backward_kernel<8>, 256);
  else launch(conv_backward_kernel<1>, 32);
  check_launch("conv_backward_kernel");
  GDN_CUDA(cudaMemsetAsync(sums, 0, static_cast<std::size_t>(width * 4), context.stream));
  sum_parts(out, parts, width, sums, context);
  conv_parameters_kernel<<<static_cast<unsigned>((channels + 255) / 256), 256, 0, context.stream>>>(sums, channels, d_weight, d_bias);
  check_launch("conv_parameters_kernel");
}

} // namespace gdn::kernels
