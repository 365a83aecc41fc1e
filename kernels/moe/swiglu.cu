#include "kernels/moe/swiglu.h"

#include "kernels/common/matrix.cuh"

namespace gdn::kernels {
namespace {

struct SwiGluParams {
  Matrix fc1, weight, act;
};
template <int N>
struct SwiGlu {
  SwiGluParams p;
  __device__ void operator()(std::int64_t r, std::int64_t c) const {
    const Values<N> gate = load_values<N>(p.fc1, r, c), up = load_values<N>(p.fc1, r, p.act.cols + c);
    const float w = p.weight.data ? load_value(p.weight, r, 0) : 1.0f;
    Values<N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.x[i] = gate.x[i] * sigmoid(gate.x[i]) * up.x[i] * w;
    store_values<N>(p.act, r, c, y);
  }
};

// A warp a row.
template <int N>
__global__ void __launch_bounds__(256)
    swiglu_backward_kernel(Matrix fc1, Matrix weight, Matrix d_act, Gradient d_fc1, Gradient d_weight) {
  const std::int64_t r = (blockIdx.x * std::int64_t{256} + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (r >= d_act.rows) return;
  const float w = weight.data ? load_value(weight, r, 0) : 1.0f;
  float along = 0.0f;
  for (std::int64_t c = lane * N; c < d_act.cols; c += 32 * N) {
    const Values<N> gate = load_values<N>(fc1, r, c), up = load_values<N>(fc1, r, d_act.cols + c), d = load_values<N>(d_act, r, c);
    Values<N> d_gate, d_up;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(gate.x[i]), silu = gate.x[i] * s;
      along += silu * up.x[i] * d.x[i];
      d_gate.x[i] = d.x[i] * w * up.x[i] * s * (1.0f + gate.x[i] * (1.0f - s));
      d_up.x[i] = d.x[i] * w * silu;
    }
    if (d_fc1.to.data == nullptr) continue;
    put_values<N>(d_fc1, r, c, d_gate);
    put_values<N>(d_fc1, r, d_act.cols + c, d_up);
  }
  if (d_weight.to.data == nullptr) return;
  along = lane_sum<32>(along);
  if (lane == 0) put_value(d_weight, r, 0, along);
}

} // namespace

void swiglu_forward(const Matrix& fc1, const Matrix& weight, const Matrix& act, const LaunchContext& context) {
  for_rows<SwiGlu>(SwiGluParams{fc1, weight, act}, act.rows, act.cols, vector_matrices({fc1, act}), context, "swiglu_forward");
}

void swiglu_backward(const Matrix& fc1, const Matrix& weight, const Matrix& d_act, const Gradient& d_fc1, const Gradient& d_weight,
                     const LaunchContext& context) {
  if (d_act.rows == 0) return;
  const auto ctas = static_cast<unsigned>((d_act.rows * 32 + 255) / 256);
  const auto kernel = vector_matrices({fc1, d_act, d_fc1.to}) ? swiglu_backward_kernel<8> : swiglu_backward_kernel<1>;
  kernel<<<ctas, 256, 0, context.stream>>>(fc1, weight, d_act, d_fc1, d_weight);
  check_launch("swiglu_backward_kernel");
}

} // namespace gdn::kernels
