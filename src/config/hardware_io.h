#pragma once
#include "config/hardware.h"
#include "config/node.h"

namespace gdn::config {

// A hardware profile from the map of its keys. Every figure is `{value: ..., source: ...}` with a
// unit: "143155 MiB" (powers of 1024), "4.8 TB/s" and "989 TFLOP/s" (powers of 1000), "3 us".
// Throws Error{Config} with position, key and what is allowed; a figure without a source is an error.
Hardware read_hardware(const Node& map);

// The map that read_hardware gives the same hardware back from.
Node to_node(const Hardware& hardware);

} // namespace gdn::config
