#include "trainer/hf/config_json.h"

#include <algorithm>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace gdn::trainer::hf {

using config::LayerKind;
using config::MlpKind;

// Everything that these architectures fix and a model of ours may not have.
void require_expressible(const config::Model& m, const std::string& type) {
  auto need = [&](bool ok, const std::string& what) {
    if (!ok) throw Error(ErrorCode::Checkpoint, fmt::format("model '{}' cannot be exported as {}: {}", m.name, type, what));
  };
  const bool next = type == "qwen3_next", moe_only = type == "qwen3_5_moe_text";
  need(next || moe_only || type == "qwen3_5_text", "known are qwen3_next, qwen3_5_text, qwen3_5_moe_text");
  const bool attention = std::count(m.mixers.begin(), m.mixers.end(), LayerKind::Attention) > 0;
  const bool moe = std::count(m.mlps.begin(), m.mlps.end(), MlpKind::Moe) > 0;
  const bool dense = std::count(m.mlps.begin(), m.mlps.end(), MlpKind::Dense) > 0;
  for (LayerKind kind : m.mixers)
    need(kind == LayerKind::Gdn || kind == LayerKind::Attention, fmt::format("it has {} layers", name_of(kind)));
  need(next || moe != dense, "it mixes dense and MoE layers, which only qwen3_next can");
  need(next || moe == moe_only, moe ? "it has MoE layers (qwen3_5_moe_text has)" : "it has no MoE layers (qwen3_5_text has none)");
  need(m.zero_centred_norm, "its norms are not zero-centred");
  need(m.norm_eps == m.gdn.norm_eps, "the GDN output norm has an epsilon of its own");
  need(!m.gdn.bias && !m.gdn.conv_bias, "its GDN layers have a bias");
  need(m.gdn.use_qk_l2norm && !m.gdn.negative_eigenvalues, "its GDN layers leave q and k as they are, or double beta");
  need(m.vision == std::nullopt, "its vision tower is not trained here");
  need(m.mtp_layers <= 1, "it has more than one MTP layer");
  if (attention) {
    const config::AttentionShape& a = m.attention;
    need(a.output_gate && a.qk_norm && !a.whole_vector_qk_norm && a.rope && !a.qkv_bias,
         "its attention is not gated, normalised per head, rotary and free of biases");
  }
  if (moe) {
    const config::MoeShape& e = m.moe;
    need(e.score == "softmax" && e.shared_ffn > 0 && e.shared_gate,
         "its router is not a softmax with a gated shared expert");
    need(next || e.renormalise, "its router does not renormalise, which only qwen3_next can say");
  }
}

std::string config_json(const config::Model& m, const std::string& model_type, DType dtype) {
  require_expressible(m, model_type);
  using json = nlohmann::ordered_json;
  const bool next = model_type == "qwen3_next";
  json c;
  c["architectures"] = json::array({next                              ? "Qwen3NextForCausalLM"
                                    : model_type == "qwen3_5_text"    ? "Qwen3_5ForCausalLM"
                                                                      : "Qwen3_5MoeForCausalLM"});
  c["model_type"] = model_type;
  c["dtype"] = dtype == DType::BF16 ? "bfloat16" : "float32";
  c["vocab_size"] = m.vocab;
  c["hidden_size"] = m.hidden;
  c["num_hidden_layers"] = m.layers();
  c["layer_types"] = json::array();
  for (LayerKind kind : m.mixers) c["layer_types"].push_back(kind == LayerKind::Gdn ? "linear_attention" : "full_attention");
  c["tie_word_embeddings"] = m.tied_embeddings;
  c["hidden_act"] = "silu";
  c["rms_norm_eps"] = m.norm_eps;
  c["linear_num_key_heads"] = m.gdn.key_heads;
  c["linear_num_value_heads"] = m.gdn.value_heads;
  c["linear_key_head_dim"] = m.gdn.key_head_dim;
  c["linear_value_head_dim"] = m.gdn.value_head_dim;
  c["linear_conv_kernel_dim"] = m.gdn.conv_kernel;
  c["num_attention_heads"] = m.attention.heads;
  c["num_key_value_heads"] = m.attention.kv_heads;
  c["head_dim"] = m.attention.head_dim;
  c["attention_bias"] = false;
  c["rope_parameters"] = {{"rope_type", "default"},
                          {"rope_theta", m.attention.rope_theta},
                          {"partial_rotary_factor", m.attention.rotary_fraction}};
  if (m.ffn > 0) c["intermediate_size"] = m.ffn;
  if (next || model_type == "qwen3_5_moe_text") {
    std::vector<std::int64_t> dense;
    for (std::int64_t i = 0; i < m.layers(); ++i)
      if (m.mlps[static_cast<size_t>(i)] == MlpKind::Dense) dense.push_back(i);
    c["num_experts"] = m.moe.experts;
    c["num_experts_per_tok"] = m.moe.top_k;
    c["moe_intermediate_size"] = m.moe.ffn;
    c["shared_expert_intermediate_size"] = m.moe.shared_ffn;
    c["router_aux_loss_coef"] = m.moe.aux_loss_coeff;
    if (next) {
      c["norm_topk_prob"] = m.moe.renormalise;
      c["decoder_sparse_step"] = 1;
      c["mlp_only_layers"] = dense;
    }
  }
  if (m.mtp_layers > 0) c["mtp_num_hidden_layers"] = m.mtp_layers;
  return c.dump(2) + "\n";
}

} // namespace gdn::trainer::hf
