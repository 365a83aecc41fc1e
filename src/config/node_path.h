#pragma once
#include <string>

#include <fmt/core.h>

#include "config/node.h"

// Names of values inside a document, as messages show them: "run.recompute_modules[1]".
namespace gdn::config {

inline std::string shortened(std::string path) { return path.size() > 200 ? path.substr(0, 200) + "..." : path; }
inline std::string path_in_list(const Node& list, std::size_t index) { return shortened(fmt::format("{}[{}]", list.path, index)); }
inline std::string path_in_map(const Node& map, const std::string& key) { return shortened(map.path.empty() ? key : map.path + "." + key); }

} // namespace gdn::config
