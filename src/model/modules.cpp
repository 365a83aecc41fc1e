#include "model/modules.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::model {

// Megatron-LM main d98e8a64, dev d48bd6be, core_r0.19.0 f8837c04, core_r0.18.0 dc0ee41a,
// core_r0.17.0 432585d5; changes by pull request.
const std::vector<Module>& all_modules() {
  constexpr SpanKind kBlock = SpanKind::WholeBlock, kDiscard = SpanKind::DiscardOutput;
  static const std::vector<std::string_view> every{"main", "dev", "core_r0.19", "core_r0.18",
                                                   "core_r0.17"};
  static const std::vector<Module> modules{
      {"core_attn", kBlock, false, "core attention of full-attention layers", every, ""},
      {"moe_act", kDiscard, false, "expert activation x probability", every, ""},
      {"layernorm", kDiscard, false, "input and pre-MLP norms that are not fused into a linear",
       every, ""},
      {"mla_up_proj", kDiscard, true, "up-projection and RoPE of multi-latent attention", every,
       ""},
      {"mlp", kBlock, false, "dense MLP", every, ""},
      {"moe", kBlock, false, "router, dispatch, experts, combine and shared expert", every, ""},
      {"shared_experts", kBlock, false, "shared expert and its gate", every, ""},
      {"gdn_norm_out",
       kDiscard,
       false,
       "gated output norm and the exchange behind it (#4715)",
       {"main", "dev", "core_r0.19"},
       ""},
      {"gdn_qkv", kBlock, false, "in_proj to gates of a GDN layer (#5283)", {}, "gdn_qkv"},
      {"gdn_in_proj_conv",
       kBlock,
       false,
       "in_proj and conv1d of a GDN layer (#5982)",
       {},
       "gdn_in_proj_conv"},
      {"gdn", kBlock, false, "the whole GDN mixer (#5296)", {"dev"}, "gdn"},
      {"gdp_in_proj", kDiscard, true, "input projection of GatedDeltaProduct layers", {"main"}, ""},
      {"gdp_qkv", kDiscard, true, "q/k/v preparation of GatedDeltaProduct layers", {"main"}, ""},
      {"mhc", kDiscard, true, "hyper-connection intermediates", {"main", "dev"}, ""}};
  return modules;
}

const Module* find_module(std::string_view name) {
  for (const Module& m : all_modules())
    if (m.name == name) return &m;
  return nullptr;
}

bool offers(const Revision& revision, std::string_view name) {
  const Module* m = find_module(name);
  if (m == nullptr) return false;
  return std::find(m->bases.begin(), m->bases.end(), revision.base) != m->bases.end() ||
         (!m->change.empty() && revision.has(m->change));
}

std::vector<std::string> offered_modules(const Revision& revision) {
  std::vector<std::string> names;
  for (const Module& m : all_modules())
    if (offers(revision, m.name)) names.emplace_back(m.name);
  return names;
}

std::string where_offered(const Module& m) {
  std::string text = fmt::format("{}", fmt::join(m.bases, ", "));
  if (m.change.empty()) return text;
  return text + (text.empty() ? "" : ", or ") + fmt::format("any base with +{}", m.change);
}

ModuleName parse_module(std::string_view text) {
  const size_t colon = text.find(':');
  ModuleName name{std::string(text.substr(0, colon)), colon != std::string_view::npos};
  if (name.discard && text.substr(colon + 1) != "discard")
    throw Error(ErrorCode::Usage,
                fmt::format("module '{}': unknown kind '{}'{}", text, text.substr(colon + 1),
                            did_you_mean(text.substr(colon + 1), {"discard"})),
                "write NAME or NAME:discard");
  if (find_module(name.name) == nullptr) {
    std::vector<std::string> known;
    for (const Module& m : all_modules()) known.emplace_back(m.name);
    throw Error(
        ErrorCode::Usage,
        fmt::format("unknown recompute module '{}'{}", name.name, did_you_mean(name.name, known)),
        fmt::format("known: {}", fmt::join(known, ", ")));
  }
  return name;
}

SpanKind kind_of(const ModuleName& module) {
  return module.discard ? SpanKind::DiscardOutput : find_module(module.name)->kind;
}

bool is_hypothetical(const ModuleName& module) {
  return module.discard && find_module(module.name)->kind != SpanKind::DiscardOutput;
}

const std::vector<ModuleConflict>& module_conflicts() {
  static const std::vector<ModuleConflict> conflicts{
      {"gdn", "gdn_norm_out", "recompute.13", "gdn already recomputes the output norm"},
      {"gdn", "gdn_qkv", "recompute.14", "gdn already recomputes the front end"},
      {"mhc", "mlp", "recompute.19", "hyper-connections checkpoint the MLP themselves"}};
  return conflicts;
}

const ModuleConflict* find_conflict(std::string_view a, std::string_view b) {
  for (const ModuleConflict& c : module_conflicts())
    if ((c.a == a && c.b == b) || (c.a == b && c.b == a)) return &c;
  return nullptr;
}

config::Granularity active_granularity(const config::Run& run) {
  if (run.settings.moe_layer_recompute && run.recompute.granularity != config::Granularity::Full)
    return config::Granularity::Selective;
  return run.recompute.granularity;
}

std::vector<std::string> active_modules(const config::Run& run) {
  if (active_granularity(run) != config::Granularity::Selective) return {};
  std::vector<std::string> modules = run.recompute.modules.value_or(
      run.stack == "native" ? std::vector<std::string>{} : std::vector<std::string>{"core_attn"});
  if (run.settings.moe_layer_recompute &&
      std::find(modules.begin(), modules.end(), "moe") == modules.end())
    modules.emplace_back("moe");
  return modules;
}

} // namespace gdn::model
