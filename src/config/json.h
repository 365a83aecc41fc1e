#pragma once
#include <string>
#include <string_view>

#include "config/node.h"

namespace gdn::config {

// One JSON document with the same guarantees as parse_yaml: duplicate keys and absurd depth are
// errors, and every node knows its line and column.
Node parse_json(std::string_view text, const std::string& file);

} // namespace gdn::config
