#pragma once
#include <algorithm>

#include "kernels/common/matrix.h"

// Normalisation and rotation of rows. One description covers RMSNorm of whole rows, RMSNorm of heads
// (one statistic a head, or one for all heads of a token), L2 norm, rotary embedding, and their chains.
namespace gdn::kernels {

// A unit is `span` consecutive heads of `dim` columns that share a statistic; unit u starts at head
// u * span of a matrix whose rows are whole heads. span * dim is a multiple of 8, at most 8192.
struct HeadNorm {
  std::int64_t units = 0;
  int dim = 0, span = 1;
  // y = x * rstd * w, rstd = (mean of x^2 + eps)^(-1/2), or of the sum of x^2; w = weight, or 1 + weight.
  bool normalise = true, mean = true, zero_centred = false;
  Matrix weight = {}; // [1, span * dim]; absent: 1
  float eps = 1e-6f;
  // Then columns i and i + rotary / 2 of a head turn by position * theta^(-2 i / rotary).
  int rotary = 0;     // even, at most 256; 0: no rotation
  double theta = 1e7;
  int heads = 1;      // of a token: head h belongs to token h / heads
  const std::int32_t* positions = nullptr; // [tokens], in their sequences

  int width() const { return span * dim; }
};

void head_norm_forward(const HeadNorm& norm, const Matrix& x, const Matrix& y, float* rstd, const LaunchContext& context);

// dx from dy and x, or from the normalised x where `normalised`. d_weight [width] is added to, absent: not
// made; scratch only for it.
struct HeadNormBackward {
  Matrix x = {};
  bool normalised = false;
  const float* rstd = nullptr; // absent: made again from x
  Matrix dy = {};
  Gradient dx = {};
  float* d_weight = nullptr;
};
void head_norm_backward(const HeadNorm& norm, const HeadNormBackward& p, const LaunchContext& context);

constexpr std::int64_t head_norm_parts(std::int64_t units, std::int64_t width) {
  return std::clamp<std::int64_t>(width <= 256 ? (units + 7) / 8 : units, 1, 512);
}
constexpr std::int64_t head_norm_backward_scratch(std::int64_t units, std::int64_t width) {
  return head_norm_parts(units, width) * width * 4;
}

} // namespace gdn::kernels
