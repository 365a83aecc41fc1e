#include "core/revision.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn {

bool Revision::has(std::string_view change) const {
  return std::find(changes.begin(), changes.end(), change) != changes.end();
}

std::string Revision::text() const {
  std::string out = base;
  for (const std::string& c : changes) out += "+" + c;
  return out;
}

const std::vector<std::string>& Revision::known_bases() {
  static const std::vector<std::string> bases{"main", "dev", "core_r0.19", "core_r0.18", "core_r0.17"};
  return bases;
}

const std::vector<std::string>& Revision::known_changes() {
  static const std::vector<std::string> changes{"gdn_qkv", "l2norm_kernel", "gdn_in_proj_conv", "gate_views", "gdn"};
  return changes;
}

Revision Revision::parse(std::string_view text) {
  Revision r;
  std::vector<std::string> parts;
  size_t at = 0;
  while (true) {
    size_t plus = text.find('+', at);
    parts.emplace_back(text.substr(at, plus - at));
    if (plus == std::string_view::npos) break;
    at = plus + 1;
  }
  auto require = [&](const std::string& part, const std::vector<std::string>& known, const char* what) {
    if (std::find(known.begin(), known.end(), part) == known.end())
      throw Error(ErrorCode::Usage,
                  fmt::format("revision '{}': unknown {} '{}'{}", text, what, part, did_you_mean(part, known)),
                  fmt::format("known: {}", fmt::join(known, ", ")));
  };
  require(parts[0], known_bases(), "base");
  r.base = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    require(parts[i], known_changes(), "change");
    if (!r.has(parts[i])) r.changes.push_back(parts[i]);
  }
  std::sort(r.changes.begin(), r.changes.end());
  return r;
}

} // namespace gdn
