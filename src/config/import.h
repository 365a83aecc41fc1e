#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/node.h"
#include "config/profiles.h"

// Reading what other programs write: Hugging Face config.json and Megatron-LM arguments.
namespace gdn::config {

// The map of a model file (model_io.h) for a Hugging Face configuration of a known `model_type`
// (qwen3_next, qwen3_5, qwen3_5_moe and their *_text forms, olmo_hybrid). `notes` receives the keys
// that were not read and what was assumed. Error{Config}: unknown model_type, missing or bad keys.
Node model_from_hugging_face(const Node& config, const std::string& name, std::vector<std::string>& notes);

struct MegatronArguments {
  std::vector<Setting> run;            // run keys (run_io.h) in order, defaults of Megatron-LM first
  Node model = {};                     // map of a model file; kind Null unless num_layers was given
  std::vector<std::string> unread = {}; // every argument that nothing here reads, with its values
  std::vector<std::string> notes = {}; // what was assumed
};

// Megatron-LM arguments as one would paste them into a shell: quotes, backslash continuations and
// # comments are understood; `$VARIABLES` are not and are an error. A leading command up to the
// first option is skipped. `file` is named in messages.
MegatronArguments read_megatron_arguments(std::string_view text, const std::string& file);

} // namespace gdn::config
