#include "trainer/hf/layout.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::trainer::hf {

using model::Parameter;
using model::Part;

namespace {

const std::vector<std::string> kModelTypes{"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"};

// Parameters of a layer that are one tensor of the same shape.
const std::unordered_map<std::string_view, std::string_view> kSame{
    {"input_norm", "input_layernorm.weight"},
    {"mlp_norm", "post_attention_layernorm.weight"},
    {"gdn.conv1d", "linear_attn.conv1d.weight"},
    {"gdn.A_log", "linear_attn.A_log"},
    {"gdn.dt_bias", "linear_attn.dt_bias"},
    {"gdn.out_norm", "linear_attn.norm.weight"},
    {"gdn.out_proj", "linear_attn.out_proj.weight"},
    {"attention.q_norm", "self_attn.q_norm.weight"},
    {"attention.k_norm", "self_attn.k_norm.weight"},
    {"attention.linear_proj", "self_attn.o_proj.weight"},
    {"moe.router", "mlp.gate.weight"},
    {"moe.shared.fc2", "mlp.shared_expert.down_proj.weight"},
    {"moe.shared.gate", "mlp.shared_expert_gate.weight"},
    {"mlp.fc2", "mlp.down_proj.weight"}};
const std::unordered_map<std::string_view, std::string_view> kSameOfMtp{
    {"enorm", "mtp.pre_fc_norm_embedding.weight"},
    {"hnorm", "mtp.pre_fc_norm_hidden.weight"},
    {"eh_proj", "mtp.fc.weight"},
    {"final_norm", "mtp.norm.weight"}};

class Mapper {
public:
  Mapper(const config::Model& model, const Naming& naming) : model_(model), naming_(naming) {}

  void map(const Parameter& p) {
    if (p.part == Part::Vision) return;
    const std::string_view local = p.local;
    if (p.part == Part::Mtp && p.layer > 0) refuse(p, "it has one MTP layer");
    if (local == "embedding.word") vocabulary(p, naming_.prefix + "embed_tokens.weight");
    else if (local == "head") vocabulary(p, "lm_head.weight");
    else if (auto mtp = kSameOfMtp.find(local); p.part == Part::Mtp && mtp != kSameOfMtp.end()) whole(p, mtp->second);
    else if (local == "final_norm") whole(p, naming_.prefix + "norm.weight");
    else layer(p, p.part == Part::Mtp ? "mtp.layers.0." : fmt::format("{}layers.{}.", naming_.prefix, p.layer));
    if (local == "embedding.word" && naming_.stored_tied_head) {
      vocabulary(p, "lm_head.weight");
      tensors.back().copy = true;
    }
  }

  std::vector<MappedTensor> tensors = {};

private:
  void layer(const Parameter& p, const std::string& at) {
    const std::string_view local = p.local;
    if (auto same = kSame.find(local); same != kSame.end()) {
      if (local == "attention.q_norm" && model_.attention.whole_vector_qk_norm) refuse(p, "its q and k norms are per head");
      whole(p, at + std::string(same->second));
    } else if (local == "gdn.in_proj") {
      naming_.interleaved_projection() ? interleaved_projection(p, at) : flat_projection(p, at);
    } else if (local == "attention.linear_qkv") attention(p, at, "weight");
    else if (local == "attention.linear_qkv.bias") attention(p, at, "bias");
    else if (local == "mlp.fc1") gate_up(p, at + "mlp.");
    else if (local == "moe.shared.fc1") gate_up(p, at + "mlp.shared_expert.");
    else if (local == "moe.experts.fc1") expert_gate_up(p, at + "mlp.experts.");
    else if (local == "moe.experts.fc2") expert_down(p, at + "mlp.experts.");
    else refuse(p, "it has no such weight");
  }

  static std::int64_t row_elements(const Parameter& p) { return p.elements() / p.shape[0]; }
  static Piece rows(const Parameter& p, std::int64_t first, std::int64_t count) {
    return {&p, first * row_elements(p), count * row_elements(p)};
  }
  static std::int64_t first_row(const Parameter& p, std::string_view section) {
    std::int64_t first = 0;
    for (const model::Section& s : p.sections) {
      if (s.name == section) return first;
      first += s.size;
    }
    return first + p.section(section).size; // throws: there is no such section
  }
  static Piece section(const Parameter& p, std::string_view name) {
    return rows(p, first_row(p, name), p.section(name).size);
  }

  void add(std::string name, std::vector<std::int64_t> shape, std::vector<Piece> pieces) {
    tensors.push_back({std::move(name), std::move(shape), std::move(pieces)});
  }
  // Rows of the parameter, whatever they are, under one name.
  void add_rows(std::string name, std::vector<Piece> pieces) {
    const Parameter& p = *pieces.front().parameter;
    std::vector<std::int64_t> shape = p.shape;
    std::int64_t elements = 0;
    for (const Piece& piece : pieces) elements += piece.count;
    shape[0] = elements / row_elements(p);
    add(std::move(name), std::move(shape), std::move(pieces));
  }
  void whole(const Parameter& p, std::string_view name) { add(std::string(name), p.shape, {{&p, 0, p.elements()}}); }
  void vocabulary(const Parameter& p, std::string name) { add_rows(std::move(name), {rows(p, 0, model_.vocab)}); }

  void flat_projection(const Parameter& p, const std::string& at) {
    add_rows(at + "linear_attn.in_proj_qkv.weight", {section(p, "q"), section(p, "k"), section(p, "v")});
    add_rows(at + "linear_attn.in_proj_z.weight", {section(p, "z")});
    add_rows(at + "linear_attn.in_proj_b.weight", {section(p, "beta")});
    add_rows(at + "linear_attn.in_proj_a.weight", {section(p, "alpha")});
  }

  // Per key head: its q, its k, the v and the z of its value heads; likewise b and a.
  void interleaved_projection(const Parameter& p, const std::string& at) {
    const config::GdnShape& s = model_.gdn;
    std::vector<Piece> qkvz, ba;
    auto take = [&](std::vector<Piece>& out, const char* section, std::int64_t head, std::int64_t width) {
      out.push_back(rows(p, first_row(p, section) + head * width, width));
    };
    for (std::int64_t head = 0; head < s.key_heads; ++head) {
      take(qkvz, "q", head, s.key_head_dim);
      take(qkvz, "k", head, s.key_head_dim);
      take(qkvz, "v", head, s.expansion() * s.value_head_dim);
      take(qkvz, "z", head, s.expansion() * s.value_head_dim);
      take(ba, "beta", head, s.expansion());
      take(ba, "alpha", head, s.expansion());
    }
    add_rows(at + "linear_attn.in_proj_qkvz.weight", std::move(qkvz));
    add_rows(at + "linear_attn.in_proj_ba.weight", std::move(ba));
  }

  // linear_qkv repeats per query group [query heads | their gates | k | v]; q_proj holds a head's
  // query and gate side by side.
  void attention(const Parameter& p, const std::string& at, const std::string& suffix) {
    const config::AttentionShape& a = model_.attention;
    if (!a.output_gate) refuse(p, "its attention has an output gate");
    const std::int64_t d = a.head_dim, heads = a.heads / a.kv_heads, group = (2 * heads + 2) * d;
    std::vector<Piece> q, k, v;
    for (std::int64_t g = 0; g < a.kv_heads; ++g) {
      const std::int64_t first = g * group;
      for (std::int64_t head = 0; head < heads; ++head) {
        q.push_back(rows(p, first + head * d, d));
        q.push_back(rows(p, first + (heads + head) * d, d));
      }
      k.push_back(rows(p, first + 2 * heads * d, d));
      v.push_back(rows(p, first + (2 * heads + 1) * d, d));
    }
    add_rows(at + "self_attn.q_proj." + suffix, std::move(q));
    add_rows(at + "self_attn.k_proj." + suffix, std::move(k));
    add_rows(at + "self_attn.v_proj." + suffix, std::move(v));
  }

  void gate_up(const Parameter& p, const std::string& at) {
    add_rows(at + "gate_proj.weight", {section(p, "gate")});
    add_rows(at + "up_proj.weight", {section(p, "up")});
  }

  bool fused(const Parameter& p) const {
    return p.part == Part::Mtp ? naming_.fused_mtp_experts : naming_.fused_experts;
  }
  // [experts, gate | up, hidden]: the fused tensor has the same order.
  void expert_gate_up(const Parameter& p, const std::string& at) {
    if (fused(p)) return whole(p, at + "gate_up_proj");
    const std::int64_t ffn = p.section("gate").size, hidden = p.shape[2], matrix = ffn * hidden;
    for (std::int64_t e = 0; e < p.shape[0]; ++e) {
      add(fmt::format("{}{}.gate_proj.weight", at, e), {ffn, hidden}, {{&p, 2 * e * matrix, matrix}});
      add(fmt::format("{}{}.up_proj.weight", at, e), {ffn, hidden}, {{&p, (2 * e + 1) * matrix, matrix}});
    }
  }
  void expert_down(const Parameter& p, const std::string& at) {
    if (fused(p)) return whole(p, at + "down_proj");
    const std::int64_t matrix = p.shape[1] * p.shape[2];
    for (std::int64_t e = 0; e < p.shape[0]; ++e)
      add(fmt::format("{}{}.down_proj.weight", at, e), {p.shape[1], p.shape[2]}, {{&p, e * matrix, matrix}});
  }

  [[noreturn]] void refuse(const Parameter& p, const char* why) const {
    throw Error(ErrorCode::Checkpoint,
                fmt::format("parameter '{}' has no place in the Hugging Face layout {}: {}", p.name, naming_.model_type, why));
  }

  const config::Model& model_;
  const Naming& naming_;
};

} // namespace

void require_known_model_type(const std::string& model_type) {
  if (std::find(kModelTypes.begin(), kModelTypes.end(), model_type) == kModelTypes.end())
    throw Error(ErrorCode::Checkpoint,
                fmt::format("weights of model_type '{}' are not read or written{}", model_type,
                            did_you_mean(model_type, kModelTypes)),
                fmt::format("known: {}", fmt::join(kModelTypes, ", ")));
}

std::vector<MappedTensor> map_tensors(const model::ParameterTable& table, const config::Model& model,
                                      const Naming& naming) {
  require_known_model_type(naming.model_type);
  Mapper mapper(model, naming);
  for (const Parameter& p : table.parameters) mapper.map(p);
  return std::move(mapper.tensors);
}

Placement::Placement(const std::vector<MappedTensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::int64_t next = 0;
    for (const Piece& p : tensors[i].pieces) {
      runs_[p.parameter->name].push_back({p.first, p.count, i, next, tensors[i].copy});
      next += p.count;
    }
  }
  for (auto& [name, runs] : runs_)
    std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.first < b.first; });
}

const std::vector<Placement::Run>& Placement::runs(const Parameter& parameter) const {
  auto it = runs_.find(parameter.name);
  if (it == runs_.end())
    throw Error(ErrorCode::Checkpoint, fmt::format("no tensor of the checkpoint holds parameter '{}'", parameter.name));
  return it->second;
}

} // namespace gdn::trainer::hf
