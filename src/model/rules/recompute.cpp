#include <charconv>

#include <fmt/format.h>

#include "core/error.h"
#include "model/rules/check.h"
#include "model/spans.h"

// Recompute: rows 1 to 20 of the stack's list, top to bottom. Row 7 is the default list
// (active_modules); rows 21-22 are arguments, 23-27 CUDA graphs, 28 expert overlap, 29-30 run time.
namespace gdn::model::rules {

namespace {

const char* const kModules = "recompute_modules";

std::string name_of_granularity(config::Granularity g) {
  switch (g) {
  case config::Granularity::None: return "none";
  case config::Granularity::Selective: return "selective";
  case config::Granularity::Full: return "full";
  }
  return number(static_cast<std::int64_t>(g));
}

// Rows 1 to 6: offload, granularity, method, layers.
void check_granularity(Check& c) {
  const config::Recompute& r = c.run.recompute;
  const bool any = r.granularity != config::Granularity::None || c.settings.moe_layer_recompute;
  if (c.run.cpu_offloading) { // row 1
    const std::int64_t n = c.run.cpu_offloading_num_layers;
    if (n < 0 || n >= c.model.layers())
      c.reject("recompute.1", Exception::ValueError, "cpu_offloading_num_layers", number(n),
               "is outside the model", fmt::format("0 to {}", c.model.layers() - 1));
    if (c.run.parallel.pp > 1)
      c.reject(
          "recompute.1", Exception::ValueError, "cpu_offloading", "true",
          fmt::format("does not combine with pipeline parallelism (pp = {})", c.run.parallel.pp));
    if (any)
      c.reject(
          "recompute.1", Exception::ValueError, "cpu_offloading", "true",
          fmt::format("does not combine with recompute ({})", name_of_granularity(r.granularity)));
  }
  if (!any && r.modules && !r.modules->empty())
    c.warn("recompute.7", kModules, fmt::format("{}", fmt::join(*r.modules, ", ")), "does nothing without selective granularity",
           "set recompute_granularity to selective");
  // Row 2: the reader refuses other spellings; this catches a value made by hand.
  if (r.granularity != config::Granularity::None &&
      r.granularity != config::Granularity::Selective && r.granularity != config::Granularity::Full)
    c.reject("recompute.2", Exception::ValueError, "recompute_granularity",
             name_of_granularity(r.granularity), "is no granularity", "none, selective, full");
  if (!r.method.empty() && r.method != "block" && r.method != "uniform") // row 3
    c.reject("recompute.3", Exception::ValueError, "recompute_method", r.method, "is no method",
             "uniform, block", nearest(r.method, {"uniform", "block"}));
  if (c.full && r.method.empty()) // row 4
    c.reject("recompute.4", Exception::ValueError, "recompute_method", "null",
             "full granularity needs a method", "uniform, block");
  if (c.full && !r.num_layers) // row 5
    c.reject("recompute.5", Exception::ValueError, "recompute_num_layers", "null",
             "full granularity needs the number of layers", ">= 1");
  if (r.granularity == config::Granularity::Selective && r.num_layers)
    c.reject("recompute.5", Exception::ValueError, "recompute_num_layers", number(*r.num_layers),
             "belongs to full granularity", "unset");
  if (c.run.distribute_saved_activations && c.run.parallel.sequence_parallel) // row 6
    c.reject("recompute.6", Exception::ValueError, "distribute_saved_activations", "true",
             "does not combine with sequence parallelism");
}

// Native's own modules, and its defaults switched off.
void check_native_names(Check& c) {
  for (const std::string& name : active_modules(c.run))
    if (!is_native_module(name))
      c.reject("native.module", Exception::Plan, kModules, name,
               find_module(name) != nullptr ? "stack megatron has this module, stack native has not" : "stack native has no such module",
               fmt::format("{}", fmt::join(native_modules(), ", ")), nearest(name, native_modules()));
}

// Row 8. A discard form that no revision has is priced as a hypothesis, whatever the revision.
void check_names(Check& c) {
  const std::vector<std::string> allowed = offered_modules(c.run.revision);
  for (const ModuleName& m : c.modules) {
    const Module* module = find_module(m.name);
    if (module != nullptr && is_hypothetical(m)) {
      c.tolerate("plan.hypothetical", Exception::Plan, kModules, m.name + ":discard",
                 fmt::format("no revision has a discard form of {}", m.name),
                 "price it with --hypothetical");
      continue;
    }
    if (contains(allowed, m.name)) continue;
    if (module != nullptr)
      c.reject("recompute.8", Exception::AssertionError, kModules, m.name,
               fmt::format("revision {} has no such module; it is in {}", c.run.revision.text(),
                           where_offered(*module)),
               fmt::format("{}", fmt::join(allowed, ", ")));
    else
      c.reject("recompute.8", Exception::AssertionError, kModules, m.name,
               is_native_module(m.name) ? "stack native has this module, stack megatron has not" : "unknown module",
               fmt::format("{}", fmt::join(allowed, ", ")), nearest(m.name, allowed));
  }
}

// Rows 9 to 17: what single modules and pairs need.
void check_modules(Check& c) {
  if (c.lists("moe_act") && !c.run.moe_grouped_gemm) // row 9
    c.reject("recompute.9", Exception::ValueError, kModules, "moe_act", "needs moe_grouped_gemm");
  if (c.lists("mla_up_proj") && !c.settings.multi_latent_attention) // row 10
    c.tolerate("recompute.10", Exception::ValueError, kModules, "mla_up_proj",
               "needs multi_latent_attention", "inert here: these models have no MLA layer");
  const bool any_gdn = c.variant == "gdn" || c.variant == "gdn2";
  if (c.lists("gdn_norm_out") && !any_gdn) // row 11
    c.reject("recompute.11", Exception::ValueError, kModules, "gdn_norm_out",
             "no GDN layer present: needs attention variant gdn or gdn2");
  for (const char* name : {"gdn", "gdn_qkv", "gdn_in_proj_conv"}) // row 12
    if (c.lists(name) && c.variant != "gdn")
      c.reject("recompute.12", Exception::ValueError, kModules, name,
               any_gdn ? "is not defined for GDN2"
                       : "no GDN layer present: needs attention variant gdn");
  for (const char* name : {"gdn_norm_out", "gdn_qkv"}) // rows 13 and 14
    if (const ModuleConflict* conflict = find_conflict("gdn", name);
        c.lists("gdn") && c.lists(name))
      c.reject(std::string(conflict->rule), Exception::ValueError, kModules,
               fmt::format("gdn, {}", name),
               fmt::format("gdn and {} cannot be combined: {}", name, conflict->why));
  if (c.lists("core_attn")) // row 15
    c.warn("recompute.15", kModules, "core_attn",
           "does next to nothing where core attention is fused");
  if (c.lists("shared_experts") && c.run.overlap.shared_experts &&
      c.model.moe.shared_ffn > 0) // row 16
    c.reject("recompute.16", Exception::ValueError, kModules, "shared_experts",
             "cannot be combined with moe_shared_expert_overlap");
  if (!c.fp8) return;
  for (const char* name : {"moe_act", "layernorm"}) { // row 17
    if (!c.lists(name)) continue;
    if (c.run.fp8_recipe == "delayed")
      c.reject("recompute.17", Exception::ValueError, kModules, name,
               "delayed fp8 scaling is unsupported", "tensorwise, mxfp8, blockwise");
    if (!version_at_least(c.settings.te_version, "2.6"))
      c.reject("recompute.17", Exception::ValueError, "te_version", c.settings.te_version,
               fmt::format("{} under fp8 needs Transformer Engine 2.6.0dev0 or later", name),
               ">= 2.6.0dev0");
  }
}

// Rows 18 to 20: the deprecated spelling, hyper-connections.
void check_other_forms(Check& c) {
  if (c.settings.moe_layer_recompute) { // row 18
    c.warn("recompute.18", "moe_layer_recompute", "true", "deprecated", "list the module moe");
    if (c.full)
      c.reject("recompute.18", Exception::ValueError, "moe_layer_recompute", "true",
               "does not combine with full granularity");
  }
  if (c.lists("mhc")) { // row 19
    if (!c.settings.enable_mhc_connections)
      c.tolerate("recompute.19", Exception::ValueError, kModules, "mhc",
                 "needs enable_mhc_connections",
                 "inert here: these models have no hyper-connections");
    if (const ModuleConflict* conflict = find_conflict("mhc", "mlp"); c.lists("mlp"))
      c.reject(std::string(conflict->rule), Exception::ValueError, kModules, "mhc, mlp",
               fmt::format("mhc and mlp cannot be combined: {}", conflict->why));
    if (const auto& text = c.settings.mhc_recompute_layer_num) {
      int n = 0;
      const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), n);
      if (error != std::errc{} || end != text->data() + text->size() || n < 1)
        c.reject("recompute.19", Exception::ValueError, "mhc_recompute_layer_num", *text,
                 "is no positive integer", ">= 1");
    }
    if (c.run.fine_grained_offload)
      c.reject("recompute.19", Exception::NotImplementedError, "fine_grained_activation_offloading",
               "true", "is not implemented with mhc recompute");
  }
  if (!c.settings.enable_mhc_connections) return; // row 20
  const char* key = "enable_mhc_connections";
  if (!c.lists("mhc"))
    c.warn("recompute.20", key, "true", "costs much memory without mhc recompute",
           "list the module mhc");
  if (c.model.mtp_layers > 0 && c.run.train_mtp)
    c.reject("recompute.20", Exception::ValueError, key, "true",
             "does not combine with multi-token prediction");
  if (c.full)
    c.reject("recompute.20", Exception::NotImplementedError, key, "true",
             "is not implemented with full recompute");
  if (c.run.parallel.pp > 1)
    c.reject("recompute.20", Exception::NotImplementedError, key, "true",
             "is not implemented with pipeline parallelism");
  if (c.settings.fp32_residual_connection)
    c.reject("recompute.20", Exception::NotImplementedError, key, "true",
             "is not implemented with an fp32 residual stream");
}

} // namespace

void check_recompute(Check& c) {
  check_granularity(c);
  if (c.megatron) {
    check_names(c);
    check_modules(c);
    check_other_forms(c);
  } else {
    check_native_names(c);
    if (c.run.lora.rank > 0)
      c.reject("native.lora", Exception::Plan, "lora_rank", number(c.run.lora.rank), "stack native has no adapters", "0, or stack megatron");
  }
  for (const config::UserSpan& span : c.run.recompute.user_spans)
    if (span.name == "none" || find_module(span.name) != nullptr || is_native_module(span.name))
      c.reject("plan.span_name", Exception::Plan, "spans", span.name, "is taken", "a name that no module has");
    else
      c.tolerate("plan.hypothetical", Exception::Plan, "spans", span.name,
                 "no revision has this span", "price it with --hypothetical");
}

} // namespace gdn::model::rules
