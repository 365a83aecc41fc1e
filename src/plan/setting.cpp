#include "plan/setting.h"

#include <algorithm>

#include <fmt/format.h>

#include "model/modules.h"

namespace gdn::plan {

using config::Granularity;

std::string Setting::text() const {
  if (granularity == Granularity::Full) return fmt::format("full {} {}", method, num_layers);
  std::vector<std::string> names = modules; // in one order whatever the user's, so that texts can be joined on
  std::sort(names.begin(), names.end());
  for (const config::UserSpan& s : user_spans) names.push_back(s.name + (s.discard ? ":discard" : ""));
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, " + "));
}

Setting Setting::of(const config::Run& run) {
  const config::Recompute& r = run.recompute;
  Setting s;
  s.granularity = model::active_granularity(run);
  s.method = r.method;
  s.num_layers = r.num_layers.value_or(0);
  s.modules = model::active_modules(run);
  s.user_spans = r.user_spans;
  return s;
}

config::Run Setting::applied_to(config::Run run) const {
  run.recompute.granularity = granularity;
  run.recompute.method = method;
  run.recompute.num_layers = granularity == Granularity::Full ? std::optional(num_layers) : std::nullopt;
  run.recompute.modules = granularity == Granularity::Selective ? std::optional(modules) : std::nullopt;
  run.recompute.user_spans = user_spans;
  return run;
}

} // namespace gdn::plan
