#include "model/rules/check.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include <fmt/core.h>

namespace gdn::model::rules {

using config::Granularity;
using config::LayerKind;
using config::MlpKind;

namespace {

bool has(const std::vector<LayerKind>& mixers, LayerKind kind) {
  return std::find(mixers.begin(), mixers.end(), kind) != mixers.end();
}
bool has(const std::vector<MlpKind>& mlps, MlpKind kind) {
  return std::find(mlps.begin(), mlps.end(), kind) != mlps.end();
}

// Unknown names and kinds are kept as they are: rule recompute.8 reports them.
ModuleName split(const std::string& text) {
  const std::string suffix = ":discard";
  if (text.size() > suffix.size() && text.ends_with(suffix))
    return {text.substr(0, text.size() - suffix.size()), true};
  return {text, false};
}

} // namespace

Check::Check(const config::Model& m, const config::Run& r)
    : model(m), run(r), settings(r.settings) {
  megatron = run.stack == "megatron";
  selective = active_granularity(run) == Granularity::Selective;
  full = active_granularity(run) == Granularity::Full;
  for (const std::string& text : active_modules(run)) modules.push_back(split(text));
  has_gdn = has(model.mixers, LayerKind::Gdn);
  has_gdn2 = has(model.mixers, LayerKind::Gdn2);
  has_attention = has(model.mixers, LayerKind::Attention);
  has_moe = has(model.mlps, MlpKind::Moe);
  has_dense = has(model.mlps, MlpKind::Dense);
  variant = run.attention_variant;
  if (variant == "gated_delta_net") variant = "gdn";
  if (variant.empty()) variant = has_gdn ? "gdn" : has_gdn2 ? "gdn2" : "";
  fp8 = !run.fp8_recipe.empty();
}

bool Check::lists(std::string_view name) const {
  return std::any_of(modules.begin(), modules.end(),
                     [&](const ModuleName& m) { return m.name == name; });
}

bool Check::offloads(std::string_view name) const { return contains(run.offload_modules, name); }

bool Check::captures_whole_layers() const {
  return graphs() && (run.cuda_graph_scope.empty() || run.cuda_graph_impl == "full_iteration" ||
                      contains(run.cuda_graph_scope, "full_iteration"));
}

bool Check::captured(std::string_view scope) const {
  return captures_whole_layers() || (graphs() && contains(run.cuda_graph_scope, scope));
}

bool Check::splits_heads() const {
  return !megatron || run.revision.base != "dev" || settings.linear_cp_mode == "headwise";
}

void Check::reject(std::string rule, Exception exception, std::string key, std::string value,
                   std::string message, std::string allowed, std::string hint) {
  found.push_back({std::move(rule), exception, Verdict::Rejected, std::move(key), std::move(value),
                   std::move(message), std::move(allowed), std::move(hint)});
}

void Check::tolerate(std::string rule, Exception exception, std::string key, std::string value,
                     std::string message, std::string hint) {
  found.push_back({std::move(rule),
                   exception,
                   Verdict::Tolerated,
                   std::move(key),
                   std::move(value),
                   std::move(message),
                   {},
                   std::move(hint)});
}

void Check::warn(std::string rule, std::string key, std::string value, std::string message,
                 std::string hint) {
  found.push_back({std::move(rule),
                   Exception::Warning,
                   Verdict::Warned,
                   std::move(key),
                   std::move(value),
                   std::move(message),
                   {},
                   std::move(hint)});
}

std::string number(std::int64_t n) { return fmt::format("{}", n); }
std::string number(double x) { return fmt::format("{}", x); }

bool contains(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool version_at_least(std::string_view version, std::string_view minimum) {
  auto next = [](std::string_view& text) {
    int number = 0;
    size_t i = 0;
    for (; i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])); ++i)
      number = number * 10 + (text[i] - '0');
    text.remove_prefix(i);
    // "0dev1" ends the comparison: what follows the digits is no release number.
    if (!text.empty() && text[0] == '.')
      text.remove_prefix(1);
    else
      text = {};
    return number;
  };
  while (!version.empty() || !minimum.empty()) {
    const int v = next(version), m = next(minimum);
    if (v != m) return v > m;
  }
  return true;
}

} // namespace gdn::model::rules
