#pragma once
#include <string>
#include <vector>

#include "config/run.h"

namespace gdn::plan {

// One choice of what to recompute.
struct Setting {
  config::Granularity granularity = config::Granularity::None;
  std::string method = {};         // full: "uniform" | "block"
  std::int64_t num_layers = 0;     // full
  std::vector<std::string> modules = {}; // selective: names, "NAME:discard"
  std::vector<config::UserSpan> user_spans = {};

  // "none", "gdn_norm_out + moe", "full uniform 1"
  std::string text() const;
  // The setting a run asks for; Megatron's default list where selective names none.
  static Setting of(const config::Run& run);
  // `run` with this setting in place of its own.
  config::Run applied_to(config::Run run) const;
};

} // namespace gdn::plan
