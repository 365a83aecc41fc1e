#include "model/native/attention.h"

#include "model/kinds/attention.h"
#include "model/kinds/attention_pre.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"
#include "model/qkv_layout.h"

namespace gdn::model::native {

namespace {

AttentionAttr attributes(const config::Model& model, const config::Run& run, const HeadsPerRank& heads, const Dims& d) {
  const config::AttentionShape& s = model.attention;
  return {.heads = heads.query, .kv_heads = heads.kv, .head_dim = s.head_dim,
          .rotary_dim = s.rope ? static_cast<std::int64_t>(static_cast<double>(s.head_dim) * s.rotary_fraction) : 0,
          .theta = s.rope_theta, .seq = d.attention_keys, .fused = run.fused_attention, .dropout = run.attention_dropout,
          .sequences = d.sequences,
          .qk_norm = s.whole_vector_qk_norm ? QkNorm::WholeVector : s.qk_norm ? QkNorm::PerHead : QkNorm::None,
          .eps = model.norm_eps, .zero_centred = model.zero_centred_norm};
}

// Gains of the q and k norms: a head's columns, or all of this rank's heads'.
std::optional<ParamRef> gain(const Builder& b, const char* name, std::int64_t heads, const AttentionAttr& a, DType dtype) {
  if (a.qk_norm == QkNorm::None) return {};
  return b.param(name, (a.qk_norm == QkNorm::WholeVector ? heads : 1) * a.head_dim, dtype);
}

} // namespace

TensorId attention_mixer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d) {
  const config::AttentionShape& s = model.attention;
  const HeadsPerRank heads = attention_heads_per_rank(s, d.tp);
  const AttentionAttr a = attributes(model, run, heads, d);
  const QkvLayout at = QkvLayout::of(s, heads);
  const std::int64_t n = a.heads, g = a.kv_heads, hd = a.head_dim, width = at.columns / d.tp;

  TensorId xn = rms_norm(b, "input_norm", x, b.param("input_norm", d.hidden, d.dtype),
                         {model.norm_eps, model.zero_centred_norm}, "xn").y;               // [N_sp, h]
  TensorId mixed = linear(b, "linear_qkv", xn, b.param("attention.linear_qkv", width * d.hidden, d.dtype), width,
                          {TensorParallel::Column, d.tp, d.sp, s.qkv_bias}, "mixed");     // [N, groups of q | gate | k | v]
  std::vector<GroupSection> sections{{"q_columns", 0, at.query}, {"k_columns", at.key_at, hd}, {"v_columns", at.value_at, hd}};
  if (s.output_gate) sections.push_back({"gate", at.gate_at, at.query});
  std::vector<TensorId> parts; // [N g, columns of a group]
  if (heads.kv_replicas > 1) { // the even shard is no whole group: gather all columns, take this rank's
    TensorId gathered = gather_columns(b, "linear_qkv.gather", mixed, d.tp, true, "mixed_gathered", at.shared(s, heads));
    TensorId group = split(b, "linear_qkv.slice", gathered, {{"mixed_slice", {d.tokens, at.width}}})[0];
    mixed = copy(b, "linear_qkv.copy", group, "mixed_group");
    parts = split_groups(b, "split", mixed, g, sections); // other ranks' q columns get a zero gradient
  } else {
    parts = group_slices(b, mixed, g, sections);
  }
  AttentionInputs in = attention_pre(b, "attention_pre", {parts[0], parts[1], parts[2]}, gain(b, "attention.q_norm", n, a, d.dtype),
                                     gain(b, "attention.k_norm", g, a, d.dtype), a);
  TensorId o = core_attention(b, in.q, in.k, in.v, a, run.cp_comm_type, d.cp);              // [N, n, hd]
  if (s.output_gate) o = output_gate(b, "output_gate", o, parts[3], "attn_gated");
  return linear(b, "linear_proj", o, b.param("attention.linear_proj", n * hd * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp, false}, "out");                         // [N_sp, h]
}

} // namespace gdn::model::native
