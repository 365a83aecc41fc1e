#pragma once
#include <string>
#include <vector>

#include "config/profiles.h"

// The built-in profiles of published models.
namespace gdn::test {

inline config::Model known_model(const std::string& name) {
  static const config::Profiles profiles;
  return profiles.model(name).model;
}

inline std::vector<config::Model> known_models() {
  std::vector<config::Model> models;
  for (const char* name :
       {"qwen3-next-80b-a3b", "qwen3-coder-next", "qwen3.8-2.4t-a95b", "qwen3.5-397b-a17b",
        "qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "qwen3.5-27b", "qwen3.5-9b", "qwen3.5-4b",
        "qwen3.5-2b", "qwen3.5-0.8b", "olmo-hybrid-7b", "kimi-linear-48b-a3b", "jet-nemotron-2b",
        "jet-nemotron-4b", "fla-gdn-1.3b", "fla-gdn-340m"})
    models.push_back(known_model(name));
  return models;
}

} // namespace gdn::test
