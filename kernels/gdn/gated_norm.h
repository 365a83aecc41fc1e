#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.h"

namespace gdn::kernels {

// y = weight * o * rstd * silu(z), rstd = (mean(o^2) + epsilon)^(-1/2) per token and head; the
// weight is shared by the heads and used as it is. o, y contiguous; rows of z at z_stride, heads
// next to each other inside a row.
struct GatedNormInputs {
  std::int64_t tokens = 0;
  int heads = 0, width = 0;     // width a multiple of 8, at most 256
  const Bf16* o = nullptr;      // [tokens, heads, width]
  const Bf16* z = nullptr;      // [tokens, heads, width]
  std::int64_t z_stride = 0;    // elements per token
  const Bf16* weight = nullptr; // [width]
  float epsilon = 1e-6f;
};

struct GatedNormForwardParams {
  GatedNormInputs in;
  Bf16* y = nullptr;     // [tokens, heads, width]
  float* rstd = nullptr; // [tokens, heads]
};
void gated_norm_forward(const GatedNormForwardParams& params, const LaunchContext& context);

// d_o and dz are written, d_weight is added to in fixed order. d_o may be the storage of dy.
struct GatedNormBackwardParams {
  GatedNormInputs in;
  const float* rstd = nullptr; // [tokens, heads], from the forward
  const Bf16* dy = nullptr;    // [tokens, heads, width]
  Bf16* d_o = nullptr;         // [tokens, heads, width]
  Bf16* dz = nullptr;          // [tokens, heads, width] at dz_stride
  std::int64_t dz_stride = 0;
  float* d_weight = nullptr; // [width]
};
void gated_norm_backward(const GatedNormBackwardParams& params, const LaunchContext& context);

// CTAs that sum the weight gradient: by shape only, so that the sum's order never varies.
constexpr std::int64_t gated_norm_parts(std::int64_t tokens, int heads) {
  return std::clamp<std::int64_t>(tokens * heads / 128, 1, 1024);
}
constexpr std::int64_t gated_norm_backward_scratch(std::int64_t tokens, int heads, int width) {
  return gated_norm_parts(tokens, heads) * width * 4;
}

} // namespace gdn::kernels
