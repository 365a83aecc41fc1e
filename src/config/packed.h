#pragma once
#include <string>
#include <string_view>

#include "config/node.h"

// Built-in profiles are parsed when the programs are built: reading them back takes microseconds, where the YAML
// library takes milliseconds.
namespace gdn::config {

// A parsed document as text. Positions ("file:line:column") lose their file.
std::string pack(const Node& document);

// The node that parse_yaml would have made of the text that came as `file`.
Node unpack(std::string_view packed, const std::string& file);

} // namespace gdn::config
