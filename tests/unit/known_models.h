#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "config/model.h"

// The published models of the GDN family, as their model cards give them.
namespace gdn::test {

using config::LayerKind;
using config::MlpKind;
using config::Model;

struct Sizes {
  std::int64_t hidden, layers, value_heads, heads, kv_heads;
  std::int64_t experts = 0, top_k = 0, ffn = 0; // ffn: of an expert, or of the dense MLP
  std::int64_t vocab = 248320;
  bool tied = false;
  std::int64_t mtp = 1;
};

inline Model qwen(const std::string& name, const Sizes& s) {
  Model m;
  m.name = name;
  m.hidden = s.hidden;
  m.vocab = s.vocab;
  m.tied_embeddings = s.tied;
  for (std::int64_t i = 0; i < s.layers; ++i) {
    m.mixers.push_back((i + 1) % 4 == 0 ? LayerKind::Attention : LayerKind::Gdn);
    m.mlps.push_back(s.experts > 0 ? MlpKind::Moe : MlpKind::Dense);
  }
  m.gdn.value_heads = s.value_heads;
  m.attention.heads = s.heads;
  m.attention.kv_heads = s.kv_heads;
  if (s.experts > 0) {
    m.moe.experts = s.experts;
    m.moe.top_k = s.top_k;
    m.moe.ffn = m.moe.shared_ffn = s.ffn;
  } else {
    m.ffn = s.ffn;
  }
  m.mtp_layers = s.mtp;
  return m;
}

inline Model with_vision(Model m, std::int64_t depth, std::int64_t hidden, std::int64_t heads, std::int64_t ffn) {
  m.vision = config::VisionShape{depth, hidden, heads, ffn, m.hidden};
  return m;
}
inline Model tower_a(Model m) { return with_vision(std::move(m), 27, 1152, 16, 4304); }
inline Model tower_b(Model m) { return with_vision(std::move(m), 24, 1024, 16, 4096); }
inline Model tower_c(Model m) { return with_vision(std::move(m), 12, 768, 12, 3072); }

inline Model olmo_hybrid_7b() {
  Model m = qwen("olmo-hybrid-7b", {3840, 32, 30, 30, 30, 0, 0, 11008, 100352, false, 0});
  m.gdn.key_heads = 30;
  m.gdn.key_head_dim = 96;
  m.gdn.value_head_dim = 192;
  m.gdn.negative_eigenvalues = true;
  m.attention.head_dim = 128;
  m.attention.output_gate = false;
  m.attention.whole_vector_qk_norm = true;
  return m;
}

inline Model kimi_linear_48b() {
  Model m = qwen("kimi-linear-48b-a3b", {2304, 27, 32, 32, 32, 256, 8, 1024, 163840, false, 0});
  m.parameters_only = true;
  m.unmodelled_kind = "KDA";
  m.unmodelled_sizes = {{"low_rank", 128}, {"mla_kv_rank", 512}, {"mla_nope_dim", 128}, {"mla_rope_dim", 64},
                        {"mla_value_dim", 128}};
  m.gdn.key_heads = 32;
  m.moe.shared_gate = false;
  m.moe.score = "sigmoid";
  m.mixers.assign(27, LayerKind::Unmodelled);
  for (size_t i : {4, 8, 12, 16, 20, 24, 27}) m.mixers[i - 1] = LayerKind::Attention;
  m.ffn = 9216;
  m.mlps[0] = MlpKind::Dense;
  return m;
}

inline Model jet_nemotron(const std::string& name, std::int64_t hidden, std::int64_t layers, std::int64_t heads,
                          std::int64_t key_dim, std::int64_t ffn, const std::vector<size_t>& attention,
                          std::int64_t attention_heads) {
  Model m = qwen(name, {hidden, layers, heads, attention_heads, 2, 0, 0, ffn, 151936, true, 0});
  m.parameters_only = true;
  m.unmodelled_kind = "JetBlock";
  m.unmodelled_sizes = {{"generator_divisor", 8}};
  m.gdn.key_heads = heads;
  m.gdn.key_head_dim = key_dim;
  m.gdn.value_head_dim = 256;
  m.attention.head_dim = 128;
  m.attention.output_gate = false;
  m.attention.qk_norm = false;
  m.attention.qkv_bias = true;
  m.mixers.assign(static_cast<size_t>(layers), LayerKind::Unmodelled);
  for (size_t i : attention) m.mixers[i] = LayerKind::Attention;
  return m;
}

inline Model fla_gdn(const std::string& name, std::int64_t hidden, std::int64_t ffn) {
  Model m = qwen(name, {hidden, 21, 6, 1, 1, 0, 0, ffn, 32000, false, 0});
  m.gdn.key_heads = 6;
  m.gdn.key_head_dim = 256;
  m.gdn.value_head_dim = 512;
  m.mixers.assign(21, LayerKind::Gdn);
  return m;
}

inline std::vector<Model> known_models() {
  return {qwen("qwen3-next-80b-a3b", {2048, 48, 32, 16, 2, 512, 10, 512, 151936}),
          qwen("qwen3-coder-next", {2048, 48, 32, 16, 2, 512, 10, 512, 151936, false, 0}),
          qwen("qwen3.8-2.4t-a95b", {8192, 92, 128, 64, 4, 512, 10, 2048}),
          tower_a(qwen("qwen3.5-397b-a17b", {4096, 60, 64, 32, 2, 512, 10, 1024})),
          tower_a(qwen("qwen3.5-122b-a10b", {3072, 48, 64, 32, 2, 256, 8, 1024})),
          tower_a(qwen("qwen3.5-35b-a3b", {2048, 40, 32, 16, 2, 256, 8, 512})),
          tower_a(qwen("qwen3.5-27b", {5120, 64, 48, 24, 4, 0, 0, 17408})),
          tower_a(qwen("qwen3.5-9b", {4096, 32, 32, 16, 4, 0, 0, 12288})),
          tower_b(qwen("qwen3.5-4b", {2560, 32, 32, 16, 4, 0, 0, 9216, 248320, true})),
          tower_b(qwen("qwen3.5-2b", {2048, 24, 16, 8, 2, 0, 0, 6144, 248320, true})),
          tower_c(qwen("qwen3.5-0.8b", {1024, 24, 16, 8, 2, 0, 0, 3584, 248320, true})),
          olmo_hybrid_7b(),
          kimi_linear_48b(),
          jet_nemotron("jet-nemotron-2b", 1536, 28, 12, 96, 8960, {14, 19, 20, 21}, 12),
          jet_nemotron("jet-nemotron-4b", 2048, 36, 16, 128, 11008, {17, 20, 32, 5, 16, 19, 21, 22, 25, 27}, 16),
          fla_gdn("fla-gdn-1.3b", 2048, 5632),
          fla_gdn("fla-gdn-340m", 1024, 2816)};
}

inline Model known_model(const std::string& name) {
  for (Model& m : known_models())
    if (m.name == name) return std::move(m);
  throw std::runtime_error("no such model: " + name);
}

} // namespace gdn::test
