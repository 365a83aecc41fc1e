#pragma once
#include <string>
#include <string_view>

#include "config/node.h"
#include "config/text.h"

namespace gdn::config {

// One YAML document. Duplicate keys, aliases, explicit tags, several documents, binary garbage and
// absurd depth or size are Error{Config} with `file`:line:column; so is everything the YAML library
// itself rejects.
Node parse_yaml(std::string_view text, const std::string& file, const TextLimits& limits = kConfiguration);

// Readable YAML of a document built from nodes; parse_yaml gives the same values back.
std::string to_yaml(const Node& node);

} // namespace gdn::config
