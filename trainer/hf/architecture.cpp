#include "trainer/hf/architecture.h"

#include <fmt/format.h>

#include "config/model_io.h"
#include "config/profiles.h"
#include "core/error.h"
#include "trainer/hf/weight_files.h"

namespace gdn::trainer::hf {

namespace {

constexpr const char* kKeys[] = {
    "layer_types", "linear_attention_type", "rms_norm_eps", "layernorm_zero_centered_gamma", "tie_word_embeddings",
    "linear_num_key_heads", "linear_num_value_heads", "linear_norm_eps", "linear_use_qk_l2norm", "linear_allow_neg_eigval",
    "num_attention_heads", "num_key_value_heads", "attn_output_gate", "qk_layernorm", "position_embedding_type",
    "partial_rotary_factor", "rope_theta", "num_experts_per_tok", "norm_topk_prob", "scoring_func", "moe_shared_expert_gate"};

std::string text_of(const config::Node* n) {
  if (!n) return "nothing";
  if (n->kind != config::Node::Kind::List) return n->text;
  std::vector<std::string> items;
  for (const config::Node& i : n->items) items.push_back(i.text);
  return fmt::format("[{}]", fmt::join(items, ", "));
}

} // namespace

void require_same_architecture(const config::Model& model, const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / kConfigFile;
  const config::Node ours = config::to_node(model);
  const config::Node theirs = config::to_node(config::Profiles().model(file.string()).model);
  for (const char* key : kKeys) {
    const std::string a = text_of(ours.find(key)), b = text_of(theirs.find(key));
    if (a != b)
      throw Error(ErrorCode::Checkpoint, fmt::format("{}: these weights are of another model: {} is {}, the model to be run has {}",
                                                     file.string(), key, b, a));
  }
}

} // namespace gdn::trainer::hf
