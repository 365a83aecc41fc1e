#include "kernels/moe/shared_gate.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

// A warp a row, in all kernels.
template <int N>
__global__ void __launch_bounds__(256) row_score_kernel(Matrix x, Matrix w, bool with_sigmoid, Matrix score) {
  const std::int64_t r = (blockIdx.x * std::int64_t{256} + threadIdx.x) / 32;
  if (r >= x.rows) return;
  float sum = 0.0f;
  for (std::int64_t c = threadIdx.x % 32 * N; c < x.cols; c += 32 * N) {
    const Values<N> a = load_values<N>(x, r, c), b = load_values<N>(w, 0, c);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += a.x[i] * b.x[i];
  }
  sum = lane_sum<32>(sum);
  if (threadIdx.x % 32 == 0) store_value(score, r, 0, with_sigmoid ? sigmoid(sum) : sum);
}

template <int N>
__global__ void __launch_bounds__(256) row_gate_backward_kernel(Matrix x, Matrix score, Matrix dy, Gradient dx, Matrix d_score) {
  const std::int64_t r = (blockIdx.x * std::int64_t{256} + threadIdx.x) / 32;
  if (r >= x.rows) return;
  const float s = load_value(score, r, 0), gate = sigmoid(s);
  float along = 0.0f;
  for (std::int64_t c = threadIdx.x % 32 * N; c < x.cols; c += 32 * N) {
    const Values<N> a = load_values<N>(x, r, c);
    Values<N> d = load_values<N>(dy, r, c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      along += d.x[i] * a.x[i];
      d.x[i] *= gate;
    }
    if (dx.to.data) put_values<N>(dx, r, c, d);
  }
  along = lane_sum<32>(along);
  if (threadIdx.x % 32 == 0) store_value(d_score, r, 0, along * gate * sigmoid(-s));
}

struct ScoreBackwardParams {
  Matrix sigmoid, d_sigmoid, d_score;
};
template <int N>
struct ScoreBackward {
  ScoreBackwardParams p;
  __device__ void operator()(std::int64_t r, std::int64_t) const {
    const float s = load_value(p.sigmoid, r, 0);
    store_value(p.d_score, r, 0, load_value(p.d_sigmoid, r, 0) * s * (1.0f - s));
  }
};

struct RowGateParams {
  Matrix x, score, y;
};
template <int N>
struct RowGate {
  RowGateParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> x = load_values<N>(p.x, r, c);
    const float gate = sigmoid(load_value(p.score, r, 0));
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] *= gate;
    store_values<N>(p.y, r, c, x);
  }
};

struct OuterParams {
  Matrix a, b;
  Gradient to;
};
template <int N>
struct Outer {
  OuterParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    Values<N> b = load_values<N>(p.b, 0, c);
    const float a = load_value(p.a, r, 0);
#pragma unroll
    for (int i = 0; i < N; ++i) b.x[i] *= a;
    put_values<N>(p.to, r, c, b);
  }
};

unsigned ctas(std::int64_t rows) { return static_cast<unsigned>((rows * 32 + 255) / 256); }

} // namespace

void row_score(const Matrix& x, const Matrix& w, bool with_sigmoid, const Matrix& score, const LaunchContext& context) {
  if (x.rows == 0) return;
  const auto kernel = vector_matrices({x, w}) ? row_score_kernel<8> : row_score_kernel<1>;
  kernel<<<ctas(x.rows), 256, 0, context.stream>>>(x, w, with_sigmoid, score);
  check_launch("row_score_kernel");
}

void row_score_backward(const Matrix& sigmoid, const Matrix& d_sigmoid, const Matrix& d_score, const LaunchContext& context) {
  for_rows<ScoreBackward>(ScoreBackwardParams{sigmoid, d_sigmoid, d_score}, d_score.rows, 1, false, context, "row_score_backward");
}

void row_gate_forward(const Matrix& x, const Matrix& score, const Matrix& y, const LaunchContext& context) {
  for_rows<RowGate>(RowGateParams{x, score, y}, x.rows, x.cols, vector_matrices({x, y}), context, "row_gate_forward");
}

void row_gate_backward(const Matrix& x, const Matrix& score, const Matrix& dy, const Gradient& dx, const Matrix& d_score,
                       const LaunchContext& context) {
  if (x.rows == 0) return;
  const auto kernel = vector_matrices({x, dy, dx.to}) ? row_gate_backward_kernel<8> : row_gate_backward_kernel<1>;
  kernel<<<ctas(x.rows), 256, 0, context.stream>>>(x, score, dy, dx, d_score);
  check_launch("row_gate_backward_kernel");
}

void outer(const Matrix& a, const Matrix& b, const Gradient& to, const LaunchContext& context) {
  for_rows<Outer>(OuterParams{a, b, to}, to.to.rows, to.to.cols, vector_matrices({b, to.to}), context, "outer");
}

} // namespace gdn::kernels
