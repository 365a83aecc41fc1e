// gdn_chunk_forward and gdn_chunk_backward: which kernels run, on which buffers.
#include "kernels/common/tensor_map.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/rule_kernels.h"
#include "kernels/gdn/rule_sizes.h"

namespace gdn::kernels {
namespace {

CUtensorMap tile_map(const char* name, const GdnTokens& t, std::int64_t tokens, int heads,
                     int width) {
  return make_tile_map({name, t.data, tokens, heads, width, t.token_stride, t.head_stride});
}

// What both directions share. `P` has the fields of either params struct.
template <class P>
RuleArgs common_args(const P& p, const LaunchContext& context, bool backward, const char* kernel) {
  check_rule_shape(p.shape, kernel);
  const RuleScratch at = rule_scratch(p.shape, backward);
  check_scratch(context, at.bytes, kernel);
  const GdnShape& s = p.shape;
  auto* scratch = static_cast<char*>(context.scratch);
  RuleArgs a{};
  if (is_wide(s)) {
    a.wide_q = p.q;
    a.wide_k = p.k;
    a.wide_v = p.v;
    a.wide_slices = (s.value_dim + 31) / 32;
    a.wide_checkpoints = reinterpret_cast<float*>(scratch + at.checkpoints);
    a.wide_z = reinterpret_cast<float*>(scratch + at.wide_z);
    a.wide_parts = reinterpret_cast<float*>(scratch + at.parts);
  } else {
    a.q = tile_map("q", p.q, s.tokens, s.key_heads, s.key_dim);
    a.k = tile_map("k", p.k, s.tokens, s.key_heads, s.key_dim);
    a.v = tile_map("v", p.v, s.tokens, s.value_heads, s.value_dim);
    a.n = tile_map("n", {p.n, std::int64_t{s.value_heads} * kChunk, kChunk}, s.tokens,
                   s.value_heads, kChunk);
  }
  a.chunks = p.table.chunks;
  a.offsets = p.table.offsets;
  a.order = p.table.order;
  a.tokens = s.tokens;
  a.sequences = s.sequences;
  a.capacity = gdn_chunk_capacity(s.tokens, s.sequences);
  a.key_heads = s.key_heads;
  a.value_heads = s.value_heads;
  a.group = s.value_heads / s.key_heads;
  a.key_dim = s.key_dim;
  a.value_dim = s.value_dim;
  a.value_tiles = (s.value_dim + 63) / 64;
  a.scale = p.scale;
  a.l2_norm = p.l2_norm;
  a.l2_epsilon = p.l2_epsilon;
  a.beta = p.beta;
  a.factors = reinterpret_cast<float*>(scratch + at.factors);
  a.p = scratch + at.p;
  if (backward) {
    a.states = scratch + at.states;
    a.d_states = scratch + at.d_states;
    a.z = scratch + at.z;
    a.e = scratch + at.e;
  }
  return a;
}

} // namespace

void gdn_chunk_forward(const GdnChunkForwardParams& p, const LaunchContext& context) {
  RuleArgs a = common_args(p, context, false, "gdn_chunk_forward");
  a.g = p.g;
  a.scale_p_by_beta = true;
  a.n_out = p.n;
  a.gamma_out = p.g_cum;
  a.q_rstd = p.q_rstd;
  a.k_rstd = p.k_rstd;
  a.o = p.o;
  a.state_in = p.initial_state;
  a.state_out = p.final_state;
  a.state_slots = p.state_slots;
  if (is_wide(p.shape)) return launch_wide_forward(a, context);
  launch_prepare(a, context);
  launch_forward_scan(a, context);
}

void gdn_chunk_backward(const GdnChunkBackwardParams& p, const LaunchContext& context) {
  RuleArgs a = common_args(p, context, true, "gdn_chunk_backward");
  const GdnShape& s = p.shape;
  a.dq = p.dq;
  a.dk = p.dk;
  a.dv = p.dv;
  a.dg = p.dg;
  a.dbeta = p.dbeta;
  a.gamma = p.g_cum;
  if (is_wide(s)) {
    a.wide_d_o = p.d_o;
    return launch_wide_backward(a, p.initial_state, p.d_final_state, p.d_initial_state, context);
  }
  a.d_o = tile_map("d_o", p.d_o, s.tokens, s.value_heads, s.value_dim);
  launch_prepare(a, context); // P and the row factors again
  a.state_in = p.initial_state;
  launch_rebuild_scan(a, context);
  a.state_in = p.d_final_state;
  a.state_out = p.d_initial_state;
  launch_reverse_scan(a, context);
  launch_gradients(a, context);
}

} // namespace gdn::kernels
