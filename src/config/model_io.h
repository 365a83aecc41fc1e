#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"
#include "config/node.h"

namespace gdn::config {

// The keys of a model file carry Hugging Face's names; Megatron-LM's name of the same size is
// accepted for any of them ("num_query_groups" for "num_key_value_heads").
struct ModelKey {
  std::string_view name;     // as in a Hugging Face config.json
  std::string_view megatron; // Megatron-LM's name, or empty
  std::string_view help;
};
const std::vector<ModelKey>& model_keys();

// The Hugging Face name of a key given under either name; empty if it is no model key.
std::string_view canonical_model_key(std::string_view key);

// A model from the map of its keys. Checks what makes a model at all (heads divide, lists have the
// right length, sizes are sane); what a stack demands of it is src/model/validate's question.
// Throws Error{Config} with position, key and what is allowed.
Model read_model(const Node& map);

// The map that read_model gives the same model back from.
Node to_node(const Model& model);

} // namespace gdn::config
