#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "config/node.h"
#include "config/run.h"

namespace gdn::config {

// One row per run key: YAML files, `--set key=value`, Megatron-LM arguments and the echo of the
// resolved configuration all go through this table. Names are Megatron-LM's; the others are marked.
struct RunKey {
  std::string_view name;
  std::string_view allowed; // what a value may be, for help and messages
  std::string_view help;
  bool megatron;            // Megatron-LM has an argument or configuration field of this name
  bool setting;             // lives under `settings:` (read by the stack's own checks only)
  void (*set)(Run& run, const Node& value);
  Node (*get)(const Run& run); // kind Null: not set
};
const std::vector<RunKey>& run_keys();
void append_setting_keys(std::vector<RunKey>& keys); // the part of the table in setting_keys.cpp
const RunKey* find_run_key(std::string_view name); // nullptr: unknown

// Sets one key. `where` says who asked ("--set", "run.yaml:3:7", "--tensor-model-parallel-size").
// Throws Error{Config}: unknown key with the nearest one, or a bad value with what is allowed.
void apply(Run& run, std::string_view key, std::string_view value, const std::string& where);
void apply(Run& run, std::string_view key, const Node& value);

// Sets every key of a map, in order; `settings:` may be nested. Unknown keys are errors.
void apply(Run& run, const Node& map);

// Every key with its value: the resolved configuration. apply() of it gives the same run.
Node to_node(const Run& run);

// Fills the layers per stage from decoder_first/last_pipeline_num_layers for a model of `layers`
// decoder layers, and checks an explicit layout against pp, vp and `layers` (Megatron-LM's rules;
// models.md 7.1). Call it once every key is set.
void resolve_layout(Run& run, std::int64_t layers);

// Layers per virtual stage of a Megatron-LM layout string such as "Et*15|t*15|(t|)*2tmL": stages are
// separated by '|', t is a decoder layer, E the embedding, m an MTP layer, L the loss. Throws at
// `value`'s position.
std::vector<std::int64_t> parse_layout(const Node& value);

} // namespace gdn::config
