#pragma once
#include <algorithm>

#include "kernels/common/matrix.h"

// The gates as ops of their own. Any of the tensors may be bf16 or fp32.
namespace gdn::kernels {

// g = -exp(a_log) softplus(f + dt_bias), [T, C]; a_log [1, C / key_dim] is shared by the channels of a head.
void decay_forward(const Matrix& f, const Matrix& a_log, const Matrix& dt_bias, int key_dim, const Matrix& g, const LaunchContext& context);
struct DecayBackwardParams {
  Matrix f, a_log, dt_bias;
  int key_dim = 1;
  Matrix dg;
  Gradient df;
  float *d_a_log = nullptr, *d_dt_bias = nullptr; // added to, in fixed order
};
void decay_backward(const DecayBackwardParams& params, const LaunchContext& context);
constexpr std::int64_t decay_parts(std::int64_t rows) { return std::clamp<std::int64_t>(rows / 64, 1, 256); }
constexpr std::int64_t decay_backward_scratch(std::int64_t rows, std::int64_t cols) { return (decay_parts(rows) + 1) * 2 * cols * 4; }

// y = factor sigmoid(x); dx (+)= factor dy sigmoid'(x).
void sigmoid_forward(const Matrix& x, float factor, const Matrix& y, const LaunchContext& context);
void sigmoid_backward(const Matrix& x, float factor, const Matrix& dy, const Gradient& dx, const LaunchContext& context);

} // namespace gdn::kernels
