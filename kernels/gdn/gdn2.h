#pragma once
#include "kernels/common/matrix.h"
#include "kernels/gdn/shape.h"

// GDN2, the delta rule with channel-wise gates, token by token in fp32: plain and exact, not fast.
//   S <- Diag(e^g) S;  u = w * v - (b * k)^T S;  S <- S + k u^T;  o = scale q^T S      per token and value head
namespace gdn::kernels {

// q, k [T, Hk dk]; g (fp32), b [T, Hg dk]; v, w [T, Hv dv]; bf16 unless noted. Value head h reads key head
// h Hk / Hv and gate head h Hg / Hv. dk, dv at most 128.
struct Gdn2 {
  GdnShape shape;      // its key_heads are Hk
  int gate_heads = 0;  // Hg
  GdnChunkTable table = {};
  float scale = 1.0f;
  Matrix q = {}, k = {}, v = {}, g = {}, b = {}, w = {};
  // Decoding (forward): sequence i continues from entry slots[i] of a pool [slots, Hv, dk, dv], which then holds its new
  // state; null: from zero. Optional: the states after every token, [T, Hv, dk, dv].
  float* state = nullptr;
  const std::int32_t* slots = nullptr;
  float* token_state = nullptr;
};
void gdn2_forward(const Gdn2& rule, const Matrix& o, const LaunchContext& context);

// sums [T, C] fp32 = g summed from the start of its 64-token chunk on.
void chunk_sums(const Matrix& g, const GdnShape& shape, const GdnChunkTable& table, const Matrix& sums, const LaunchContext& context);

struct Gdn2Backward {
  Matrix d_o = {};
  Gradient dq = {}, dk = {}, dv = {}, dg = {}, db = {}, dw = {};
};
void gdn2_backward(const Gdn2& rule, const Gdn2Backward& p, const LaunchContext& context);

// States every 64 tokens, the states and u of the 64 tokens in work, gradients of every value head: fp32.
constexpr std::int64_t gdn2_backward_scratch(const GdnShape& s) {
  const std::int64_t state = std::int64_t{s.key_dim} * s.value_dim, ctas = s.sequences * s.value_heads;
  return 4 * (gdn_chunk_capacity(s.tokens, s.sequences) * s.value_heads * state + ctas * kChunk * (state + s.value_dim) +
              s.tokens * s.value_heads * 4 * s.key_dim);
}

} // namespace gdn::kernels
