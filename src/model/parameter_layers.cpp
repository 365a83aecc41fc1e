#include "model/parameter_layers.h"

#include <utility>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::model {

using config::LayerKind;
using config::MlpKind;

Parameter& ParameterList::add(std::string local, std::vector<std::int64_t> shape, ShardRule rule,
                              int dim, Init init) {
  const std::int64_t size = shape[static_cast<size_t>(dim)];
  return add_sections(std::move(local), std::move(shape), dim, {{"all", size, rule}}, init);
}

Parameter& ParameterList::add_sections(std::string local, std::vector<std::int64_t> shape, int dim,
                                       std::vector<Section> sections, Init init) {
  Parameter p;
  p.name = prefix_ + local;
  p.local = std::move(local);
  p.part = part_;
  p.place = place_;
  p.layer = layer_;
  p.shape = std::move(shape);
  p.dim = dim;
  p.sections = std::move(sections);
  p.init = init;
  out_.push_back(std::move(p));
  return out_.back();
}

void ParameterList::add_biased_linear(const std::string& local, std::int64_t out, std::int64_t in,
                                      ShardRule rule) {
  add(local + ".weight", {out, in}, rule, rule == ShardRule::Row ? 1 : 0);
  // The bias of a row-parallel linear is added after the reduction: every rank has all of it.
  add(local + ".bias", {out}, rule == ShardRule::Column ? rule : ShardRule::Replicated, 0,
      Init::Zero);
}

void ParameterList::add_layer_norm(const std::string& local, std::int64_t width) {
  add(local + ".weight", {width}, ShardRule::Replicated, 0, Init::One);
  add(local + ".bias", {width}, ShardRule::Replicated, 0, Init::Zero);
}

namespace {

// Gain of a norm over the hidden state: stored as w and applied as 1 + w where zero-centred.
void add_norm(ParameterList& list, const config::Model& m, const char* local, std::int64_t width,
              ShardRule rule = ShardRule::Replicated) {
  list.add(local, {width}, rule, 0, m.zero_centred_norm ? Init::Zero : Init::One);
}

// The parts that GDN and GDN2 share; `sections` are those of in_proj, gate widths those of A_log
// and dt_bias.
void add_delta_rule_mixer(ParameterList& list, const config::Model& m,
                          std::vector<Section> sections, std::int64_t a_log, std::int64_t dt_bias,
                          Init dt_init) {
  const config::GdnShape& s = m.gdn;
  std::int64_t width = 0;
  for (const Section& x : sections) width += x.size;
  list.add_sections("gdn.in_proj", {width, m.hidden}, 0, sections);
  if (s.bias) list.add_sections("gdn.in_proj.bias", {width}, 0, sections, Init::Zero);
  const ShardRule column = ShardRule::Column;
  const std::vector<Section> channels{
      {"q", s.qk(), column}, {"k", s.qk(), column}, {"v", s.v(), column}};
  list.add_sections("gdn.conv1d", {s.conv_channels(), 1, s.conv_kernel}, 0, channels, Init::Conv);
  if (s.conv_bias)
    list.add_sections("gdn.conv1d.bias", {s.conv_channels()}, 0, channels, Init::Conv);
  list.add("gdn.A_log", {a_log}, column, 0, Init::ALog).dtype = DTypeGroup::Gate;
  list.add("gdn.dt_bias", {dt_bias}, column, 0, dt_init).dtype = DTypeGroup::Gate;
  // An ordinary RMSNorm (gain about 1) whatever the model's other norms are.
  list.add("gdn.out_norm", {s.value_head_dim}, ShardRule::Replicated, 0, Init::One);
  list.add("gdn.out_proj", {m.hidden, s.v()}, ShardRule::Row, 1, Init::ScaledNormal);
  if (s.bias) list.add("gdn.out_proj.bias", {m.hidden}, ShardRule::Replicated, 0, Init::Zero);
}

void add_swiglu(ParameterList& list, const std::string& prefix, std::int64_t hidden,
                std::int64_t ffn) {
  list.add_sections(prefix + ".fc1", {2 * ffn, hidden}, 0,
                    {{"gate", ffn, ShardRule::Column}, {"up", ffn, ShardRule::Column}});
  list.add(prefix + ".fc2", {hidden, ffn}, ShardRule::Row, 1, Init::ScaledNormal);
}

} // namespace

// h*(2*QK + 2*V + 2*Hv) + K*C + 2*Hv + dv + V*h
void add_gdn(ParameterList& list, const config::Model& m) {
  const config::GdnShape& s = m.gdn;
  const ShardRule column = ShardRule::Column;
  add_delta_rule_mixer(list, m,
                       {{"q", s.qk(), column},
                        {"k", s.qk(), column},
                        {"v", s.v(), column},
                        {"z", s.v(), column},
                        {"beta", s.value_heads, column},
                        {"alpha", s.value_heads, column}},
                       s.value_heads, s.value_heads, Init::One);
}

// in_proj is 4*QK + 3*V wide; A_log has Hk entries, dt_bias QK.
void add_gdn2(ParameterList& list, const config::Model& m) {
  const config::GdnShape& s = m.gdn;
  const ShardRule column = ShardRule::Column;
  add_delta_rule_mixer(list, m,
                       {{"q", s.qk(), column},
                        {"k", s.qk(), column},
                        {"v", s.v(), column},
                        {"z", s.v(), column},
                        {"f", s.qk(), column},
                        {"b", s.qk(), column},
                        {"w", s.v(), column}},
                       s.key_heads, s.qk(), Init::Gdn2DtBias);
}

// linear_qkv is laid out per query group: n/g query heads, as many gate heads, k, v.
void add_attention(ParameterList& list, const config::Model& m) {
  const config::AttentionShape& a = m.attention;
  const std::int64_t query = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
  const ShardRule column = ShardRule::Column;
  std::vector<Section> sections{{"q", query, column}};
  if (a.output_gate) sections.push_back({"gate", query, column});
  sections.push_back({"k", kv, column});
  sections.push_back({"v", kv, column});
  const std::int64_t width = query * (a.output_gate ? 2 : 1) + 2 * kv;
  list.add_sections("attention.linear_qkv", {width, m.hidden}, 0, sections).repeats = a.kv_heads;
  if (a.qkv_bias)
    list.add_sections("attention.linear_qkv.bias", {width}, 0, sections, Init::Zero).repeats =
        a.kv_heads;
  if (a.whole_vector_qk_norm) {
    add_norm(list, m, "attention.q_norm", query, column);
    add_norm(list, m, "attention.k_norm", kv, column);
  } else if (a.qk_norm) {
    add_norm(list, m, "attention.q_norm", a.head_dim);
    add_norm(list, m, "attention.k_norm", a.head_dim);
  }
  list.add("attention.linear_proj", {m.hidden, query}, ShardRule::Row, 1, Init::ScaledNormal);
}

// h*E + 3*h*f*E + 3*h*fs + h (the gate of the shared expert)
void add_moe(ParameterList& list, const config::Model& m) {
  const config::MoeShape& e = m.moe;
  list.add("moe.router", {e.experts, m.hidden}, ShardRule::Replicated);
  if (e.score == "sigmoid") { // DeepSeek-style bias of the selection, updated outside autograd
    Parameter& bias =
        list.add("moe.expert_bias", {e.experts}, ShardRule::Replicated, 0, Init::Zero);
    bias.dtype = DTypeGroup::Buffer;
    bias.trainable = false;
  }
  list.add_sections(
          "moe.experts.fc1", {e.experts, 2 * e.ffn, m.hidden}, 1,
          {{"gate", e.ffn, ShardRule::ExpertColumn}, {"up", e.ffn, ShardRule::ExpertColumn}})
      .group = ParameterGroup::RoutedExpert;
  list.add("moe.experts.fc2", {e.experts, m.hidden, e.ffn}, ShardRule::ExpertRow, 2,
           Init::ScaledNormal)
      .group = ParameterGroup::RoutedExpert;
  if (e.shared_ffn == 0) return;
  add_swiglu(list, "moe.shared", m.hidden, e.shared_ffn);
  if (e.shared_gate) list.add("moe.shared.gate", {1, m.hidden}, ShardRule::Replicated);
}

void add_dense_mlp(ParameterList& list, const config::Model& m) {
  add_swiglu(list, "mlp", m.hidden, m.ffn);
}

void add_layer(ParameterList& list, const config::Model& m, LayerKind mixer, MlpKind mlp) {
  add_norm(list, m, "input_norm", m.hidden);
  switch (mixer) {
  case LayerKind::Gdn: add_gdn(list, m); break;
  case LayerKind::Gdn2: add_gdn2(list, m); break;
  case LayerKind::Attention:
    if (m.unmodelled_sizes.contains("mla_kv_rank"))
      add_mla(list, m);
    else
      add_attention(list, m);
    break;
  case LayerKind::Unmodelled:
    if (m.unmodelled_kind == "KDA")
      add_kda(list, m);
    else if (m.unmodelled_kind == "JetBlock")
      add_jet_block(list, m);
    else
      throw Error(ErrorCode::Config,
                  fmt::format("model '{}': no parameter formula for layers of kind '{}'{}", m.name,
                              m.unmodelled_kind,
                              did_you_mean(m.unmodelled_kind, {"KDA", "JetBlock"})),
                  "known: KDA, JetBlock");
    break;
  }
  add_norm(list, m, "mlp_norm", m.hidden);
  if (mlp == MlpKind::Moe)
    add_moe(list, m);
  else
    add_dense_mlp(list, m);
}

// Conv3d patches of 2 x 16 x 16 x 3 = 1536 values, 2304 learned positions, biased linears,
// LayerNorm with bias, and one merger of 2 x 2 patches. The blocks are tensor parallel.
void add_vision(ParameterList& list, const config::VisionShape& v) {
  const std::int64_t h = v.hidden;
  list.add_biased_linear("patch_embed", h, 1536, ShardRule::Replicated);
  list.add("position_embed", {2304, h}, ShardRule::Replicated);
  for (std::int64_t i = 0; i < v.depth; ++i) {
    const std::string block = fmt::format("blocks.{}.", i);
    list.add_layer_norm(block + "norm1", h);
    list.add_biased_linear(block + "attention.linear_qkv", 3 * h, h, ShardRule::Column);
    list.add_biased_linear(block + "attention.linear_proj", h, h, ShardRule::Row);
    list.add_layer_norm(block + "norm2", h);
    list.add_biased_linear(block + "mlp.fc1", v.ffn, h, ShardRule::Column);
    list.add_biased_linear(block + "mlp.fc2", h, v.ffn, ShardRule::Row);
  }
  list.add_layer_norm("merger.norm", h);
  list.add_biased_linear("merger.fc1", 4 * h, 4 * h, ShardRule::Column);
  list.add_biased_linear("merger.fc2", v.out, 4 * h, ShardRule::Row);
}

} // namespace gdn::model
