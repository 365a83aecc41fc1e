#include "config/model_io.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::config {

namespace {

// Generous bounds that keep every product of a few sizes within 64 bits.
constexpr std::int64_t kMaxLayers = 4096;
constexpr std::int64_t kMaxHeads = 4096;
constexpr std::int64_t kMaxHeadDim = 4096;
constexpr std::int64_t kMaxWidth = 1 << 20;
constexpr std::int64_t kMaxVocab = 1 << 24;
constexpr std::int64_t kMaxExperts = 1 << 16;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 60; // of parameters

// Keys under their Hugging Face names; the same key under both names is a duplicate.
Node canonical(const Node& map) {
  Node out = map;
  for (Entry& e : out.entries) {
    std::string_view name = canonical_model_key(e.key);
    if (name.empty() || name == e.key) continue;
    if (map.find(name)) {
      Node at = e.value;
      at.where = e.where;
      at.fail(fmt::format("'{}' and '{}' are one size under two names; give it once", e.key, name));
    }
    e.key = name;
  }
  return out;
}

LayerKind linear_kind(const Node* node, bool parameters_only) {
  if (!node) return LayerKind::Gdn;
  if (node->text == "gdn") return LayerKind::Gdn;
  if (node->text == "gdn2") return LayerKind::Gdn2;
  if (parameters_only && !node->text.empty()) return LayerKind::Unmodelled;
  return as_choice(*node, {"gdn", "gdn2"}), LayerKind::Gdn;
}

// "linear_attention" | "full_attention" per layer, either listed or by interval.
std::vector<LayerKind> read_mixers(Fields& f, std::int64_t layers, LayerKind linear, const Node& map) {
  const Node* types = f.find("layer_types");
  const Node* interval = f.find("full_attention_interval");
  std::vector<LayerKind> mixers;
  if (types && interval) types->fail("give either layer_types or full_attention_interval, not both");
  if (types) {
    for (const std::string& t : as_strings(*types)) {
      Node word = Node::scalar(t, types->where, types->path);
      std::string kind = as_choice(word, {"linear_attention", "full_attention"});
      mixers.push_back(kind == "full_attention" ? LayerKind::Attention : linear);
    }
    if (mixers.size() == 1) mixers.assign(static_cast<std::size_t>(layers), mixers[0]);
    if (static_cast<std::int64_t>(mixers.size()) != layers)
      types->fail(fmt::format("{} entries for {} layers", mixers.size(), layers),
                  "give one entry per layer, or a single one for all of them");
    return mixers;
  }
  if (!interval) map.fail("missing key: full_attention_interval or layer_types",
                          "4 makes every fourth layer full attention; 1 all of them");
  std::int64_t m = as_int(*interval, 1, kMaxLayers);
  for (std::int64_t i = 0; i < layers; ++i)
    mixers.push_back((i + 1) % m == 0 ? LayerKind::Attention : linear);
  return mixers;
}

void read_gdn(Fields& f, GdnShape& g) {
  f.need("linear_num_key_heads", g.key_heads, 1, kMaxHeads);
  f.need("linear_num_value_heads", g.value_heads, 1, kMaxHeads);
  f.need("linear_key_head_dim", g.key_head_dim, 1, kMaxHeadDim);
  f.need("linear_value_head_dim", g.value_head_dim, 1, kMaxHeadDim);
  f.need("linear_conv_kernel_dim", g.conv_kernel, 1, 64);
  if (const Node* n = f.find("linear_num_value_heads"); n && g.value_heads % g.key_heads != 0)
    n->fail(fmt::format("{} value heads are not a multiple of {} key heads", g.value_heads, g.key_heads));
}

void read_gdn_options(Fields& f, GdnShape& g) {
  f.read("linear_bias", g.bias);
  f.read("linear_conv_bias", g.conv_bias);
  f.read("linear_use_qk_l2norm", g.use_qk_l2norm);
  f.read("linear_allow_neg_eigval", g.negative_eigenvalues);
  f.read("linear_norm_eps", g.norm_eps, 0, 1);
  if (const Node* n = f.find("A_init_range")) {
    if (n->kind != Node::Kind::List || n->items.size() != 2) n->fail("expected a list of two numbers");
    g.a_init_lo = as_double(n->items[0], 0, 1e6);
    g.a_init_hi = as_double(n->items[1], g.a_init_lo, 1e6);
  }
  if (const Node* n = f.find("conv_init"); n && !is_none(*n)) g.conv_init = as_double(*n, 0, 1e6);
}

void read_attention(Fields& f, AttentionShape& a) {
  f.need("num_attention_heads", a.heads, 1, kMaxHeads);
  a.kv_heads = a.heads;
  f.read("num_key_value_heads", a.kv_heads, 1, kMaxHeads);
  f.need("head_dim", a.head_dim, 1, kMaxHeadDim);
  if (const Node* n = f.find("num_key_value_heads"); n && a.heads % a.kv_heads != 0)
    n->fail(fmt::format("{} heads are not a multiple of {} key-value heads", a.heads, a.kv_heads));
}

void read_attention_options(Fields& f, AttentionShape& a) {
  a.output_gate = a.qk_norm = false; // a plain model has neither; the Qwen profiles say true
  a.rotary_fraction = 1;
  a.rope_theta = 1e4;
  f.read("attn_output_gate", a.output_gate);
  f.read("qk_layernorm", a.qk_norm);
  f.read("qk_layernorm_whole_vector", a.whole_vector_qk_norm);
  f.read("attention_bias", a.qkv_bias);
  if (const Node* n = f.find("position_embedding_type")) a.rope = as_choice(*n, {"rope", "none"}) == "rope";
  f.read("partial_rotary_factor", a.rotary_fraction, 0, 1);
  f.read("rope_theta", a.rope_theta, 1, 1e12);
}

void read_moe(Fields& f, MoeShape& m) {
  f.need("num_experts_per_tok", m.top_k, 1, kMaxExperts);
  f.need("moe_intermediate_size", m.ffn, 1, kMaxWidth);
  f.read("shared_expert_intermediate_size", m.shared_ffn, 0, kMaxWidth);
  m.shared_gate = m.shared_ffn > 0;
  f.read("moe_shared_expert_gate", m.shared_gate);
  f.read("norm_topk_prob", m.renormalise);
  f.read("router_aux_loss_coef", m.aux_loss_coeff, 0, 1e6);
  f.read("moe_z_loss_coeff", m.z_loss_coeff, 0, 1e6);
  if (const Node* n = f.find("moe_router_dtype"))
    m.router_dtype = parse_dtype(as_choice(*n, {"bf16", "fp32", "fp64"}));
  if (const Node* n = f.find("scoring_func")) m.score = as_choice(*n, {"softmax", "sigmoid"});
  if (const Node* n = f.find("num_experts_per_tok"); n && m.top_k > m.experts)
    n->fail(fmt::format("{} of {} experts", m.top_k, m.experts));
}

std::vector<MlpKind> read_mlps(Fields& f, std::int64_t layers, bool moe) {
  std::vector<MlpKind> mlps(static_cast<std::size_t>(layers), moe ? MlpKind::Moe : MlpKind::Dense);
  if (const Node* n = f.find("mlp_only_layers"))
    for (std::int64_t i : as_ints(*n, 0, layers - 1)) mlps[static_cast<std::size_t>(i)] = MlpKind::Dense;
  return mlps;
}

std::optional<VisionShape> read_vision(const Node* node) {
  if (!node || is_none(*node)) return std::nullopt;
  VisionShape v;
  Fields f(*node);
  f.need("depth", v.depth, 1, kMaxLayers);
  f.need("hidden_size", v.hidden, 1, kMaxWidth);
  f.need("num_heads", v.heads, 1, kMaxHeads);
  f.need("intermediate_size", v.ffn, 1, kMaxWidth);
  f.need("out_hidden_size", v.out, 1, kMaxWidth);
  f.done();
  return v;
}

void read_parameters(const Node* node, Model& m) {
  if (!node || is_none(*node)) return;
  Fields f(*node);
  f.need("text", m.published_text, 1, kMaxCount);
  f.read("vision", m.published_vision, 0, kMaxCount);
  f.read("mtp", m.published_mtp, 0, kMaxCount);
  f.need("total", m.published_total, 1, kMaxCount);
  f.need("source", m.parameters_source);
  f.done();
}

} // namespace

const std::vector<ModelKey>& model_keys() {
  static const std::vector<ModelKey> keys{
      {"name", "", "name of the profile"},
      {"aliases", "", "other names it is found under"},
      {"source", "", "where the figures come from"},
      {"hidden_size", "", "width of the residual stream"},
      {"num_hidden_layers", "num_layers", "decoder layers, MTP not counted"},
      {"vocab_size", "", "vocabulary before padding"},
      {"tie_word_embeddings", "", "output head shares the input embedding"},
      {"rms_norm_eps", "norm_epsilon", ""},
      {"layernorm_zero_centered_gamma", "apply_layernorm_1p", "norm weights are applied as 1 + w"},
      {"full_attention_interval", "linear_attention_freq", "layer i is full attention if (i+1) % n == 0"},
      {"layer_types", "", "linear_attention | full_attention per layer, instead of the interval"},
      {"linear_attention_type", "", "gdn | gdn2; another name only with parameters_only"},
      {"linear_num_key_heads", "", ""},
      {"linear_num_value_heads", "", ""},
      {"linear_key_head_dim", "", ""},
      {"linear_value_head_dim", "", ""},
      {"linear_conv_kernel_dim", "", "taps of the causal convolution"},
      {"linear_bias", "", "bias of the GDN projections"},
      {"linear_conv_bias", "", "bias of the GDN convolution"},
      {"linear_use_qk_l2norm", "", "q and k are L2-normalised"},
      {"linear_allow_neg_eigval", "", "beta is doubled"},
      {"linear_norm_eps", "", "epsilon of the gated output norm"},
      {"A_init_range", "", "decay rates are drawn uniformly from [lo, hi]"},
      {"conv_init", "conv_init", "convolution weights are drawn from +-value; null: torch default"},
      {"num_attention_heads", "", ""},
      {"num_key_value_heads", "num_query_groups", "default: one per attention head"},
      {"head_dim", "kv_channels", ""},
      {"attn_output_gate", "attention_output_gate", "sigmoid gate on the attention output"},
      {"qk_layernorm", "", "RMSNorm on q and k"},
      {"qk_layernorm_whole_vector", "", "that norm spans all heads at once"},
      {"attention_bias", "add_qkv_bias", ""},
      {"position_embedding_type", "", "rope | none"},
      {"partial_rotary_factor", "rotary_percent", ""},
      {"rope_theta", "rotary_base", ""},
      {"num_experts", "", "routed experts; absent or 0: dense MLP"},
      {"num_experts_per_tok", "moe_router_topk", ""},
      {"moe_intermediate_size", "moe_ffn_hidden_size", "width of a routed expert"},
      {"shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "0: no shared expert"},
      {"moe_shared_expert_gate", "", "sigmoid gate on the shared expert"},
      {"norm_topk_prob", "", "top-k probabilities are renormalised"},
      {"router_aux_loss_coef", "moe_aux_loss_coeff", ""},
      {"moe_z_loss_coeff", "", ""},
      {"moe_router_dtype", "", "bf16 | fp32 | fp64"},
      {"scoring_func", "moe_router_score_function", "softmax | sigmoid"},
      {"mlp_only_layers", "", "indices of layers with a dense MLP in an MoE model"},
      {"intermediate_size", "ffn_hidden_size", "width of the dense MLP"},
      {"mtp_num_hidden_layers", "mtp_num_layers", "multi-token prediction depth"},
      {"vision_config", "", "depth, hidden_size, num_heads, intermediate_size, out_hidden_size"},
      {"parameters", "", "parameter counts to reproduce: text, vision, mtp, total, source"},
      {"parameters_only", "", "some layers have no op list; only parameters are known"},
      {"unmodelled_sizes", "", "further sizes of layers without an op list"},
  };
  return keys;
}

std::string_view canonical_model_key(std::string_view key) {
  for (const ModelKey& k : model_keys())
    if (key == k.name || (!k.megatron.empty() && key == k.megatron)) return k.name;
  return {};
}

Model read_model(const Node& source) {
  const Node map = canonical(source);
  Fields f(map);
  for (const Entry& e : map.entries) // before anything is found missing: a misspelt key is both
    if (canonical_model_key(e.key).empty()) {
      std::vector<std::string> allowed;
      for (const ModelKey& k : model_keys()) allowed.emplace_back(k.name);
      fail_unknown_key(e, map.path, allowed);
    }
  Model m;
  f.need("name", m.name);
  if (const Node* n = f.find("aliases")) m.aliases = as_strings(*n);
  f.read("source", m.source);
  f.need("hidden_size", m.hidden, 1, kMaxWidth);
  f.need("vocab_size", m.vocab, 1, kMaxVocab);
  f.read("tie_word_embeddings", m.tied_embeddings);
  f.read("rms_norm_eps", m.norm_eps, 0, 1);
  m.zero_centred_norm = false;
  f.read("layernorm_zero_centered_gamma", m.zero_centred_norm);
  f.read("parameters_only", m.parameters_only);
  f.read("mtp_num_hidden_layers", m.mtp_layers, 0, 16);

  std::int64_t layers = 0;
  f.need("num_hidden_layers", layers, 1, kMaxLayers);
  const Node* linear = f.find("linear_attention_type");
  LayerKind kind = linear_kind(linear, m.parameters_only);
  if (kind == LayerKind::Unmodelled) m.unmodelled_kind = linear->text;
  m.mixers = read_mixers(f, layers, kind, map);
  auto has = [&](LayerKind k) { return std::count(m.mixers.begin(), m.mixers.end(), k) > 0; };
  // The other mixer's keys are known either way, so a model shrunk to one kind still reads.
  if (has(kind) || f.find("linear_num_key_heads")) read_gdn(f, m.gdn);
  read_gdn_options(f, m.gdn);
  if (has(LayerKind::Attention) || m.mtp_layers > 0 || f.find("num_attention_heads")) read_attention(f, m.attention);
  read_attention_options(f, m.attention);

  f.read("num_experts", m.moe.experts, 0, kMaxExperts);
  if (m.moe.experts > 0) read_moe(f, m.moe);
  else for (const char* k : {"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
                             "moe_shared_expert_gate", "norm_topk_prob", "router_aux_loss_coef",
                             "moe_z_loss_coeff", "moe_router_dtype", "scoring_func"}) f.find(k);
  m.mlps = read_mlps(f, layers, m.moe.experts > 0);
  f.read("intermediate_size", m.ffn, 1, kMaxWidth);
  if (m.ffn == 0 && std::count(m.mlps.begin(), m.mlps.end(), MlpKind::Dense) > 0) f.require("intermediate_size");

  m.vision = read_vision(f.find("vision_config"));
  read_parameters(f.find("parameters"), m);
  if (const Node* n = f.find("unmodelled_sizes")) {
    Fields sizes(*n);
    for (const Entry& e : n->entries) m.unmodelled_sizes[e.key] = as_int(e.value, 0, kMaxWidth);
  }
  f.done();
  return m;
}

Node to_node(const Model& m) {
  Node out;
  auto text = [&](const char* k, const std::string& v) { if (!v.empty()) out.set(k, string_node(v)); };
  auto size = [&](const char* k, std::int64_t v) { out.set(k, number_node(v)); };
  auto real = [&](const char* k, double v) { out.set(k, number_node(v)); };
  auto flag = [&](const char* k, bool v) { out.set(k, bool_node(v)); };
  text("name", m.name);
  if (!m.aliases.empty()) out.set("aliases", list_node(m.aliases));
  text("source", m.source);
  size("hidden_size", m.hidden);
  size("num_hidden_layers", m.layers());
  size("vocab_size", m.vocab);
  flag("tie_word_embeddings", m.tied_embeddings);
  real("rms_norm_eps", m.norm_eps);
  flag("layernorm_zero_centered_gamma", m.zero_centred_norm);

  bool linear = false, attention = false, gdn2 = false;
  std::vector<std::string> types;
  for (LayerKind k : m.mixers) {
    (k == LayerKind::Attention ? attention : linear) = true;
    gdn2 = gdn2 || k == LayerKind::Gdn2;
    types.emplace_back(k == LayerKind::Attention ? "full_attention" : "linear_attention");
  }
  out.set("layer_types", list_node(types));
  if (linear) {
    text("linear_attention_type", m.unmodelled_kind.empty() ? (gdn2 ? "gdn2" : "gdn") : m.unmodelled_kind);
    size("linear_num_key_heads", m.gdn.key_heads);
    size("linear_num_value_heads", m.gdn.value_heads);
    size("linear_key_head_dim", m.gdn.key_head_dim);
    size("linear_value_head_dim", m.gdn.value_head_dim);
    size("linear_conv_kernel_dim", m.gdn.conv_kernel);
    flag("linear_bias", m.gdn.bias);
    flag("linear_conv_bias", m.gdn.conv_bias);
    flag("linear_use_qk_l2norm", m.gdn.use_qk_l2norm);
    flag("linear_allow_neg_eigval", m.gdn.negative_eigenvalues);
    real("linear_norm_eps", m.gdn.norm_eps);
    Node range;
    range.kind = Node::Kind::List;
    range.items = {number_node(m.gdn.a_init_lo), number_node(m.gdn.a_init_hi)};
    out.set("A_init_range", range);
    if (m.gdn.conv_init) real("conv_init", *m.gdn.conv_init);
  }
  if (attention || m.mtp_layers > 0) {
    size("num_attention_heads", m.attention.heads);
    size("num_key_value_heads", m.attention.kv_heads);
    size("head_dim", m.attention.head_dim);
    flag("attn_output_gate", m.attention.output_gate);
    flag("qk_layernorm", m.attention.qk_norm);
    flag("qk_layernorm_whole_vector", m.attention.whole_vector_qk_norm);
    flag("attention_bias", m.attention.qkv_bias);
    text("position_embedding_type", m.attention.rope ? "rope" : "none");
    real("partial_rotary_factor", m.attention.rotary_fraction);
    real("rope_theta", m.attention.rope_theta);
  }
  if (m.moe.experts > 0) {
    size("num_experts", m.moe.experts);
    size("num_experts_per_tok", m.moe.top_k);
    size("moe_intermediate_size", m.moe.ffn);
    size("shared_expert_intermediate_size", m.moe.shared_ffn);
    flag("moe_shared_expert_gate", m.moe.shared_gate);
    flag("norm_topk_prob", m.moe.renormalise);
    real("router_aux_loss_coef", m.moe.aux_loss_coeff);
    real("moe_z_loss_coeff", m.moe.z_loss_coeff);
    text("moe_router_dtype", std::string(name_of(m.moe.router_dtype)));
    text("scoring_func", m.moe.score);
    std::vector<std::int64_t> dense;
    for (std::size_t i = 0; i < m.mlps.size(); ++i)
      if (m.mlps[i] == MlpKind::Dense) dense.push_back(static_cast<std::int64_t>(i));
    if (!dense.empty()) out.set("mlp_only_layers", list_node(dense));
  }
  if (m.ffn > 0) size("intermediate_size", m.ffn);
  size("mtp_num_hidden_layers", m.mtp_layers);
  if (m.vision) {
    Node v;
    v.set("depth", number_node(m.vision->depth));
    v.set("hidden_size", number_node(m.vision->hidden));
    v.set("num_heads", number_node(m.vision->heads));
    v.set("intermediate_size", number_node(m.vision->ffn));
    v.set("out_hidden_size", number_node(m.vision->out));
    out.set("vision_config", v);
  }
  if (m.published_total > 0) {
    Node p;
    p.set("text", number_node(m.published_text));
    p.set("vision", number_node(m.published_vision));
    p.set("mtp", number_node(m.published_mtp));
    p.set("total", number_node(m.published_total));
    p.set("source", string_node(m.parameters_source));
    out.set("parameters", p);
  }
  if (m.parameters_only) flag("parameters_only", true);
  if (!m.unmodelled_sizes.empty()) {
    Node sizes;
    for (const auto& [key, value] : m.unmodelled_sizes) sizes.set(key, number_node(value));
    out.set("unmodelled_sizes", sizes);
  }
  return out;
}

} // namespace gdn::config
