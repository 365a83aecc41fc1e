#include "model/megatron/attention.h"

#include "model/kinds/attention.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/adapted_linear.h"
#include "model/qkv_layout.h"

namespace gdn::model::megatron {

TensorId attention_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::AttentionShape& s = model.attention;
  const HeadsPerRank heads = attention_heads_per_rank(s, d.tp);
  const std::int64_t N = d.tokens, n = heads.query, g = heads.kv, hd = s.head_dim;
  const QkvLayout at = QkvLayout::of(s, heads);
  const AttentionAttr attr{.heads = n, .kv_heads = g, .head_dim = hd,
                           .rotary_dim = s.rope ? static_cast<std::int64_t>(static_cast<double>(hd) * s.rotary_fraction) : 0,
                           .theta = s.rope_theta, .seq = d.attention_keys, .fused = run.fused_attention,
                           .dropout = run.attention_dropout, .sequences = d.sequences};
  const NormAttr norm{model.norm_eps, model.zero_centred_norm};

  TensorId h = x;
  if (run.build == config::Build::Te) // fused into linear_qkv's module
    h = rms_norm(b, "linear_qkv.layer_norm", x, b.param("input_norm", d.hidden, d.dtype), norm, "ln_out").y;
  TensorId mixed = adapted_linear(b, "linear_qkv", "linear_qkv", h, b.param("attention.linear_qkv", at.columns / d.tp * d.hidden, d.dtype), at.columns / d.tp,
                          {TensorParallel::Column, d.tp, d.sp, s.qkv_bias}, "mixed", run); // [N, groups of q | gate | k | v]
  if (heads.kv_replicas > 1) { // the even shard is no whole group: gather all columns, take this rank's group
    TensorId gathered = gather_columns(b, "linear_qkv.gather", mixed, d.tp, true, "mixed_gathered", at.shared(s, heads));
    TensorId group = split(b, "linear_qkv.slice", gathered, {{"mixed_slice", {N, at.width}}})[0];
    mixed = copy(b, "linear_qkv.copy", group, "mixed_group");
  }
  std::vector<GroupSection> sections{{"q_view", 0, at.query}, {"k_view", at.key_at, hd}, {"v_view", at.value_at, hd}};
  if (s.output_gate) sections.push_back({"gate_view", at.gate_at, at.query});
  auto parts = split_groups(b, "split", mixed, g, sections);
  TensorId q = copy(b, "copy_q", parts[0], "q_copy", {N, n, hd}); // the reshape of strided heads copies
  TensorId gate = s.output_gate ? copy(b, "copy_gate", parts[3], "gate", {N, n, hd}) : -1;
  TensorId k = parts[1]; // a view: its norm's backward reads it and so pins the whole projection
  if (s.whole_vector_qk_norm) {
    NormAttr whole_q = norm, whole_k = norm;
    whole_q.group = n * hd;
    whole_k.group = g * hd;
    q = head_norm(b, "q_norm", q, b.param("attention.q_norm", n * hd, d.dtype), whole_q, {N, n, hd}, "q_norm");
    k = head_norm(b, "k_norm", k, b.param("attention.k_norm", g * hd, d.dtype), whole_k, {N, g, hd}, "k_norm");
  } else if (s.qk_norm) {
    NormAttr head = norm;
    head.group = hd;
    q = head_norm(b, "q_norm", q, b.param("attention.q_norm", hd, d.dtype), head, {N, n, hd}, "q_norm");
    k = head_norm(b, "k_norm", k, b.param("attention.k_norm", hd, d.dtype), head, {N, g, hd}, "k_norm");
  } else {
    k = copy(b, "copy_k", k, "k_copy", {N, g, hd});
  }
  if (s.rope) {
    q = rope(b, "rope_q", q, attr, "q_rot");
    k = rope(b, "rope_k", k, attr, "k_rot");
  }
  TensorId v = copy(b, "copy_v", parts[2], "v_attn", {N, g, hd});
  TensorId o = core_attention(b, q, k, v, attr, run.cp_comm_type, d.cp);                 // [N, n, d]
  if (s.output_gate) o = output_gate(b, "output_gate", o, gate, "attn_gated", run.settings.compiled);
  return adapted_linear(b, "linear_proj", "linear_proj", o, b.param("attention.linear_proj", n * hd * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp, false}, "out", run);           // [N_sp, h]
}

} // namespace gdn::model::megatron
