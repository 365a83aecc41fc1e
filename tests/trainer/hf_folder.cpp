#include "tests/trainer/hf_folder.h"

#include <cstddef>
#include <functional>
#include <span>
#include <utility>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "trainer/safetensors.h"

namespace gdn::test {

std::vector<HfFolder::Named> HfFolder::tensors() const {
  std::vector<Named> t;
  const std::int64_t qk = kKeyHeads * kKeyDim, v = kValueHeads * kValueDim;
  t.push_back({prefix() + "embed_tokens.weight", {kVocab, kHidden}});
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string at = fmt::format("{}layers.{}.", prefix(), layer);
    t.push_back({at + "input_layernorm.weight", {kHidden}});
    if (layer == 0) {
      const std::string gdn = at + "linear_attn.";
      t.push_back({gdn + "dt_bias", {kValueHeads}});
      t.push_back({gdn + "A_log", {kValueHeads}});
      t.push_back({gdn + "conv1d.weight", {2 * qk + v, 1, 4}});
      t.push_back({gdn + "norm.weight", {kValueDim}});
      t.push_back({gdn + "out_proj.weight", {kHidden, v}});
      if (next()) {
        t.push_back({gdn + "in_proj_qkvz.weight", {2 * qk + 2 * v, kHidden}});
        t.push_back({gdn + "in_proj_ba.weight", {2 * kValueHeads, kHidden}});
      } else {
        t.push_back({gdn + "in_proj_qkv.weight", {2 * qk + v, kHidden}});
        t.push_back({gdn + "in_proj_z.weight", {v, kHidden}});
        t.push_back({gdn + "in_proj_b.weight", {kValueHeads, kHidden}});
        t.push_back({gdn + "in_proj_a.weight", {kValueHeads, kHidden}});
      }
    } else {
      attention(t, at);
    }
    mlp(t, at, per_expert);
  }
  t.push_back({prefix() + "norm.weight", {kHidden}});
  if (!tied || stored_head) t.push_back({"lm_head.weight", {kVocab, kHidden}});
  if (mtp) {
    t.push_back({"mtp.fc.weight", {kHidden, 2 * kHidden}});
    t.push_back({"mtp.pre_fc_norm_embedding.weight", {kHidden}});
    t.push_back({"mtp.pre_fc_norm_hidden.weight", {kHidden}});
    t.push_back({"mtp.norm.weight", {kHidden}});
    t.push_back({"mtp.layers.0.input_layernorm.weight", {kHidden}});
    attention(t, "mtp.layers.0.");
    mlp(t, "mtp.layers.0.", mtp_per_expert);
  }
  if (vision) {
    t.push_back({"model.visual.patch_embed.proj.weight", {16, 3, 2, 16, 16}});
    t.push_back({"model.visual.blocks.0.norm1.bias", {16}});
  }
  return t;
}

float HfFolder::value(const std::string& name, std::int64_t i) const {
  const std::string& source = tied && name == "lm_head.weight" ? prefix() + "embed_tokens.weight" : name;
  std::uint64_t x = std::hash<std::string>{}(source) + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 32;
  return static_cast<float>(static_cast<int>(x % 511) - 255) / 1024.0f;
}

std::string HfFolder::config() const {
  nlohmann::ordered_json c{{"model_type", type},
                           {"vocab_size", kVocab},
                           {"hidden_size", kHidden},
                           {"num_hidden_layers", kLayers},
                           {"layer_types", {"linear_attention", "full_attention"}},
                           {"tie_word_embeddings", tied},
                           {"rms_norm_eps", 1e-6},
                           {"linear_num_key_heads", kKeyHeads},
                           {"linear_num_value_heads", kValueHeads},
                           {"linear_key_head_dim", kKeyDim},
                           {"linear_value_head_dim", kValueDim},
                           {"linear_conv_kernel_dim", 4},
                           {"num_attention_heads", kHeads},
                           {"num_key_value_heads", kKvHeads},
                           {"head_dim", kHeadDim},
                           {"intermediate_size", kFfn}};
  if (moe()) {
    c["num_experts"] = kExperts;
    c["num_experts_per_tok"] = 2;
    c["moe_intermediate_size"] = kExpertFfn;
    c["shared_expert_intermediate_size"] = kFfn;
  }
  if (mtp) c["mtp_num_hidden_layers"] = 1;
  if (!vision) return c.dump(1);
  const std::string outer = type.substr(0, type.size() - std::string("_text").size());
  const nlohmann::ordered_json whole{
      {"model_type", outer},
      {"tie_word_embeddings", tied},
      {"text_config", c},
      {"vision_config",
       {{"depth", 1}, {"hidden_size", 16}, {"num_heads", 2}, {"intermediate_size", 8}, {"out_hidden_size", kHidden}}}};
  return whole.dump(1);
}

void HfFolder::write(const std::filesystem::path& folder, const std::vector<Named>& list) const {
  std::filesystem::create_directories(folder);
  write_bytes(folder / "config.json", config() + "\n");
  write_bytes(folder / "tokenizer.json", "{\"version\": \"1.0\"}");
  const size_t half = sharded ? list.size() / 2 : list.size();
  const std::string first = sharded ? "model-00001-of-00002.safetensors" : "model.safetensors";
  write_file(folder / first, {list.begin(), list.begin() + static_cast<std::ptrdiff_t>(half)});
  if (!sharded) return;
  const std::string second = "model-00002-of-00002.safetensors";
  write_file(folder / second, {list.begin() + static_cast<std::ptrdiff_t>(half), list.end()});
  nlohmann::ordered_json map;
  for (size_t i = 0; i < list.size(); ++i) map[list[i].name] = i < half ? first : second;
  write_bytes(folder / "model.safetensors.index.json",
              nlohmann::ordered_json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump(2) + "\n");
}

void HfFolder::attention(std::vector<Named>& t, const std::string& at) {
  t.push_back({at + "self_attn.q_proj.weight", {2 * kHeads * kHeadDim, kHidden}});
  t.push_back({at + "self_attn.k_proj.weight", {kKvHeads * kHeadDim, kHidden}});
  t.push_back({at + "self_attn.v_proj.weight", {kKvHeads * kHeadDim, kHidden}});
  t.push_back({at + "self_attn.o_proj.weight", {kHidden, kHeads * kHeadDim}});
  t.push_back({at + "self_attn.q_norm.weight", {kHeadDim}});
  t.push_back({at + "self_attn.k_norm.weight", {kHeadDim}});
}

void HfFolder::mlp(std::vector<Named>& t, const std::string& at, bool each) const {
  t.push_back({at + "post_attention_layernorm.weight", {kHidden}});
  auto swiglu = [&](const std::string& name, std::int64_t width) {
    t.push_back({name + "gate_proj.weight", {width, kHidden}});
    t.push_back({name + "up_proj.weight", {width, kHidden}});
    t.push_back({name + "down_proj.weight", {kHidden, width}});
  };
  if (!moe()) return swiglu(at + "mlp.", kFfn);
  t.push_back({at + "mlp.gate.weight", {kExperts, kHidden}});
  for (int e = 0; each && e < kExperts; ++e) swiglu(fmt::format("{}mlp.experts.{}.", at, e), kExpertFfn);
  if (!each) {
    t.push_back({at + "mlp.experts.gate_up_proj", {kExperts, 2 * kExpertFfn, kHidden}});
    t.push_back({at + "mlp.experts.down_proj", {kExperts, kHidden, kExpertFfn}});
  }
  swiglu(at + "mlp.shared_expert.", kFfn);
  t.push_back({at + "mlp.shared_expert_gate.weight", {1, kHidden}});
}

void HfFolder::write_file(const std::filesystem::path& path, const std::vector<Named>& list) const {
  std::vector<trainer::TensorInfo> infos;
  for (const Named& n : list) {
    const bool fp32 = dtype == DType::FP32 || n.name.ends_with("A_log");
    infos.push_back({n.name, fp32 ? DType::FP32 : DType::BF16, n.shape});
  }
  trainer::SafetensorsWriter writer(path, infos, {{"format", "pt"}});
  for (size_t t = 0; t < infos.size(); ++t) {
    std::vector<std::byte> data;
    for (std::int64_t i = 0; i < infos[t].elements(); ++i) {
      const float x = value(infos[t].name, i);
      const auto bytes = std::as_bytes(std::span(&x, 1)); // little-endian: BF16 is the upper half
      const auto stored = bytes.subspan(static_cast<size_t>(4 - size_of(infos[t].dtype)));
      data.insert(data.end(), stored.begin(), stored.end());
    }
    writer.write(t, 0, data);
  }
  writer.commit();
}

} // namespace gdn::test
