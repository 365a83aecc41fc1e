#pragma once
#include <cstdint>

#include "kernels/gdn/chunk_forward.h"

namespace gdn::kernels {

// Gradients of gdn_chunk_forward, from its inputs (but g) and the saved `g_cum` and `n`; chunk
// states are rebuilt. dq and dk are summed over the value heads of a key head in fp32 and in fixed
// order. Every result is bitwise repeatable. Rows past cu_seqlens[sequences] of every gradient
// become zero.
struct GdnChunkBackwardParams {
  GdnShape shape;
  GdnChunkTable table;
  GdnTokens q, k, v;
  const float* g_cum = nullptr; // saved by the forward
  const float* beta = nullptr;
  float scale = 1.0f;
  bool l2_norm = false;
  float l2_epsilon = 1e-6f;
  const float* initial_state = nullptr;
  const Bf16* n = nullptr; // saved by the forward
  GdnTokens d_o;           // [tokens, value_heads, value_dim]
  const float* d_final_state =
      nullptr; // [sequences, value_heads, key_dim, value_dim] or null (zero)

  Bf16* dq = nullptr; // [tokens, key_heads, key_dim], contiguous; through the norm
  Bf16* dk = nullptr;
  Bf16* dv = nullptr;               // [tokens, value_heads, value_dim]
  float* dg = nullptr;              // [tokens, value_heads], per nat
  float* dbeta = nullptr;           // [tokens, value_heads]
  float* d_initial_state = nullptr; // as d_final_state, or null
};

std::int64_t gdn_chunk_backward_scratch(const GdnShape& shape);

void gdn_chunk_backward(const GdnChunkBackwardParams& params, const LaunchContext& context);

} // namespace gdn::kernels
