#include "trainer/bench/profile_text.h"

#include <algorithm>
#include <cctype>
#include <tuple>

#include "config/hardware_io.h"
#include "config/yaml.h"
#include "core/error.h"

namespace gdn::trainer::bench {

namespace {

// The same whatever the order of its rows and the quotes in their sources.
std::string sorted_text(config::Hardware h) {
  for (config::EfficiencyRow& r : h.efficiencies) std::replace(r.source.begin(), r.source.end(), '"', '\'');
  for (config::CollectiveRow& r : h.collectives) std::replace(r.source.begin(), r.source.end(), '"', '\'');
  std::stable_sort(h.efficiencies.begin(), h.efficiencies.end(), [](const auto& a, const auto& b) {
    return std::tie(a.provider, a.family, a.op, a.pass, a.size) < std::tie(b.provider, b.family, b.op, b.pass, b.size);
  });
  std::stable_sort(h.collectives.begin(), h.collectives.end(), [](const auto& a, const auto& b) {
    return std::tie(a.provider, a.kind, a.link) < std::tie(b.provider, b.kind, b.link);
  });
  return config::to_yaml(config::to_node(h));
}

} // namespace

std::string with_rows(const std::string& text, const std::string& section, const std::vector<std::string>& lines,
                      const std::function<bool(const std::string& line)>& replaced) {
  std::vector<std::string> out;
  std::size_t last = 0; // where the new rows go; 0: no such list
  bool inside = false;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    const std::string line = text.substr(at, end - at);
    at = end;
    if (std::isalpha(static_cast<unsigned char>(line[0]))) inside = line.starts_with(section + ":");
    const bool row = inside && line.find("- {") != std::string::npos;
    if (!row || !replaced(line)) out.push_back(line);
    if (row || (inside && last == 0)) last = out.size();
  }
  if (last > 0) out.insert(out.begin() + static_cast<std::ptrdiff_t>(last), lines.begin(), lines.end());
  std::string joined;
  for (const std::string& line : out) joined += line;
  return joined;
}

std::string text_of(const std::string& candidate, const config::Hardware& wanted, const std::string& file) {
  try {
    if (sorted_text(config::read_hardware(config::parse_yaml(candidate, file))) == sorted_text(wanted)) return candidate;
  } catch (const Error&) { // a row that should have gone is still there
  }
  return config::to_yaml(config::to_node(wanted));
}

} // namespace gdn::trainer::bench
