#pragma once
#include "kernels/gdn/shape.h"

namespace gdn::kernels {

// Everything between the projection and the rule in one pass: causal depthwise conv of width 4 +
// SiLU, split into q, k, v, L2 norm of q and k, gates. The projection's columns may be slices of
// wider rows: strides in elements, columns contiguous. Channels: q (key_heads x key_dim), k, v.
struct GdnPreInputs {
  GdnShape shape;
  GdnChunkTable table;
  const Bf16* qkv = nullptr; // [tokens, channels]
  std::int64_t qkv_stride = 0;
  const Bf16* beta_logits = nullptr; // [tokens, value_heads]
  std::int64_t beta_stride = 0;
  const Bf16* alpha = nullptr; // [tokens, value_heads]
  std::int64_t alpha_stride = 0;
  const Bf16* conv_weight = nullptr; // [channels, 4], last tap is the current token
  const Bf16* conv_bias = nullptr;   // [channels] or null
  const float* a_log = nullptr;      // [value_heads]
  const float* dt_bias = nullptr;    // [value_heads]
  bool normalise = true;             // q, k divided by (|x|^2 + epsilon)^(1/2)
  float epsilon = 1e-6f;
  bool double_beta = false; // beta in (0, 2)
};

constexpr std::int64_t gdn_channels(const GdnShape& s) {
  return 2 * std::int64_t{s.key_heads} * s.key_dim + std::int64_t{s.value_heads} * s.value_dim;
}

// Outputs contiguous; rows past the last sequence become zero.
struct GdnPreForwardParams {
  GdnPreInputs in;
  Bf16 *q = nullptr, *k = nullptr; // [tokens, key_heads, key_dim]
  Bf16* v = nullptr;               // [tokens, value_heads, value_dim]
  float* g = nullptr;              // [tokens, value_heads], -exp(A_log) softplus(alpha + dt_bias)
  float* beta = nullptr;           // [tokens, value_heads], sigmoid of its logit
};
void gdn_pre_forward(const GdnPreForwardParams& params, const LaunchContext& context);

// Recomputes what it needs from the projection, row by row. Input gradients are written (rows past
// the last sequence as zero), parameter gradients are added to, in fixed order.
struct GdnPreBackwardParams {
  GdnPreInputs in;
  const Bf16 *dq = nullptr, *dk = nullptr, *dv = nullptr; // contiguous, as the forward's outputs
  const float *dg = nullptr, *dbeta = nullptr;
  Bf16* d_qkv = nullptr;
  std::int64_t d_qkv_stride = 0;
  Bf16* d_beta_logits = nullptr;
  std::int64_t d_beta_stride = 0;
  Bf16* d_alpha = nullptr;
  std::int64_t d_alpha_stride = 0;
  float* d_conv_weight = nullptr; // [channels, 4]
  float* d_conv_bias = nullptr;   // [channels] or null
  float* d_a_log = nullptr;       // [value_heads]
  float* d_dt_bias = nullptr;     // [value_heads]
};
void gdn_pre_backward(const GdnPreBackwardParams& params, const LaunchContext& context);

// Chunks whose parameter gradients one CTA adds up before they go to memory.
inline constexpr int kPreChunksPerPart = 8;
constexpr std::int64_t gdn_pre_parts(const GdnShape& s) {
  return (gdn_chunk_capacity(s.tokens, s.sequences) + kPreChunksPerPart - 1) / kPreChunksPerPart;
}
// Bytes of partial sums: four taps and the bias per channel, two gate parameters per value head.
constexpr std::int64_t gdn_pre_backward_scratch(const GdnShape& s) {
  return gdn_pre_parts(s) * (gdn_channels(s) * 5 + 2 * std::int64_t{s.value_heads}) * 4;
}

} // namespace gdn::kernels
