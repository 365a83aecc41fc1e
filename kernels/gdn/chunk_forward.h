#pragma once
#include <cstdint>

#include "kernels/gdn/shape.h"

namespace gdn::kernels {

// A bf16 tensor [tokens, heads, width], width contiguous. Strides in elements; the tensor-core path
// wants address and strides to be multiples of 16 bytes and says so otherwise.
struct GdnTokens {
  const Bf16* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// The gated delta rule over packed sequences, in chunks of 64 tokens:
//   S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q      per token and value
//   head
// with q, k divided by their norms first if `l2_norm` ((|x|^2 + epsilon)^(1/2)). Value head i reads
// key head i / (value_heads / key_heads). Rows past cu_seqlens[sequences] of every output become
// zero.
struct GdnChunkForwardParams {
  GdnShape shape;
  GdnChunkTable table;         // of this packing, from gdn_chunk_table
  GdnTokens q, k;              // [tokens, key_heads, key_dim]
  GdnTokens v;                 // [tokens, value_heads, value_dim]
  const float* g = nullptr;    // [tokens, value_heads], log decay per token, nat, <= 0
  const float* beta = nullptr; // [tokens, value_heads]; beta |k|^2 <= 2 keeps the inverse bounded
  float scale = 1.0f;          // of the read, key_dim^(-1/2) as a rule
  bool l2_norm = false;
  float l2_epsilon = 1e-6f;
  const float* initial_state =
      nullptr; // [sequences, value_heads, key_dim, value_dim] or null (zero)

  // [sequences]: both states are pools, and sequence i's are entry state_slots[i]; null: entry i.
  const std::int32_t* state_slots = nullptr;

  Bf16* o = nullptr;            // [tokens, value_heads, value_dim], contiguous
  float* final_state = nullptr; // as initial_state (it may be the same memory), or null
  Bf16* n = nullptr;       // [tokens, value_heads, 64], for the backward: row i of a chunk holds
                           // N_ij, where T = (I + stril(B K K^T) * Lambda)^-1 = I - B N
  float* g_cum = nullptr;  // [tokens, value_heads], prefix sums of g inside each chunk, or null
  float* q_rstd = nullptr; // [tokens, key_heads], inverse norms, or null
  float* k_rstd = nullptr;
};

// Bytes of device scratch. Uses `tokens`, `sequences`, `value_heads` and the widths.
std::int64_t gdn_chunk_forward_scratch(const GdnShape& shape);

// Throws Error{Usage} when the shape or a stride is not supported, before anything is launched.
void gdn_chunk_forward(const GdnChunkForwardParams& params, const LaunchContext& context);

} // namespace gdn::kernels
