#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace gdn {

// A revision of the target stack: a base tree plus changes composed with '+', e.g.
// "main+gdn_qkv+l2norm_kernel". Bases: core_r0.17, core_r0.18, core_r0.19, main, dev.
// Changes: gdn_qkv, l2norm_kernel, gdn_in_proj_conv, gate_views (of gdn_in_proj_conv: gate inputs are
// views of the projection), gdn.
struct Revision {
  std::string base = "main";
  std::vector<std::string> changes = {};

  bool has(std::string_view change) const;
  std::string text() const;
  static const std::vector<std::string>& known_bases();
  static const std::vector<std::string>& known_changes();
  // Throws Error{Usage} naming the unknown part, what is known and the nearest spelling.
  static Revision parse(std::string_view text);
  friend bool operator==(const Revision&, const Revision&) = default;
};

} // namespace gdn
