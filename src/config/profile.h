#pragma once
#include <string>
#include <utility>
#include <vector>

#include "config/node.h"

// gdn.profile/1: one file format for what was predicted and what was measured, so that any two can be
// compared row by row.
namespace gdn::config {

struct ProfileRow {
  std::string key;    // "memory.peak_bytes", "categories.activations", "layers.gdn+moe.retained_bytes"
  double value = 0;
  std::string unit;   // "bytes", "seconds", "tokens/s", ...
  std::string source; // "predicted", "measured", "measured: user's log"
};

struct ProfileSet {
  std::string modules; // Setting::text(): "none", "gdn_qkv + moe", "full uniform 1"; or a published row's id
  std::vector<ProfileRow> rows;
  std::vector<std::string> settings = {}; // "KEY=VALUE": what this set changes in the identity's run
  const ProfileRow* find(std::string_view key) const;
};

struct Profile {
  // model, run (its source), stack, build, revision, provider, hardware, device, versions, command
  std::vector<std::pair<std::string, std::string>> identity;
  std::vector<ProfileSet> sets;
  const ProfileSet* find(std::string_view modules) const;
};

inline constexpr std::string_view kProfileSchema = "gdn.profile/1";

std::string to_yaml(const Profile& profile);
// Throws Error{Config} with file:line:column.
Profile read_profile(const Node& map);
Profile read_profile(const std::string& file);

} // namespace gdn::config
