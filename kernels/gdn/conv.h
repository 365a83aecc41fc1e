#pragma once
#include <algorithm>

#include "kernels/common/matrix.h"

// Causal depthwise convolution of width 4 over the tokens of each sequence, with or without SiLU, as an op of its
// own (fused with what follows it: gdn_pre.h). The last tap is the current token.
namespace gdn::kernels {

inline constexpr int kConvTaps = 4;
struct Conv {
  bool silu = true;
  Matrix x;                                // [T, C]
  Matrix weight, bias;                     // [C, 4]; [1, C] or absent
  const std::int32_t* positions = nullptr; // [T], in their sequences
};
void conv_forward(const Conv& conv, const Matrix& y, const LaunchContext& context);

// The pre-activation is made again from x. d_weight [C, 4] and d_bias [C] are added to in fixed order.
void conv_backward(const Conv& conv, const Matrix& dy, const Gradient& dx, float* d_weight, float* d_bias, const LaunchContext& context);
constexpr std::int64_t conv_parts(std::int64_t rows) { return std::clamp<std::int64_t>(rows / 128, 1, 128); }
constexpr std::int64_t conv_backward_scratch(std::int64_t rows, std::int64_t channels) {
  return (conv_parts(rows) + 1) * channels * (kConvTaps + 1) * 4;
}

} // namespace gdn::kernels
