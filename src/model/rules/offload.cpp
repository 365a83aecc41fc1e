#include <fmt/format.h>

#include "core/error.h"
#include "model/rules/check.h"

// Fine-grained activation offload and paged stash; row numbers count the stack's list "Offload".
namespace gdn::model::rules {

void check_offload(Check& c) {
  const config::StackSettings& o = c.settings;
  const char* key = "offload_modules";
  auto first_of = [&](std::initializer_list<const char*> names) -> std::string {
    for (const char* name : names)
      if (c.offloads(name)) return name;
    return {};
  };

  if (o.moe_paged_stash) { // row 8
    if (c.run.cpu_offloading)
      c.reject("offload.8", Exception::ValueError, "moe_paged_stash", "true",
               "does not combine with cpu_offloading");
    if (!o.moe_expert_rank_capacity_factor)
      c.reject("offload.8", Exception::ValueError, "moe_paged_stash", "true",
               "needs moe_expert_rank_capacity_factor");
    if (std::string name = first_of({"expert_fc1", "moe_act", "fused_group_mlp"});
        c.run.fine_grained_offload && !name.empty())
      c.reject("offload.8", Exception::ValueError, key, name,
               "is stashed already by moe_paged_stash");
  }
  if (!c.run.fine_grained_offload) return;

  // Row 1.
  const std::vector<std::string> allowed{"core_attn",       "attn_proj",  "expert_fc1",
                                         "fused_group_mlp", "moe_act",    "attn_norm",
                                         "mlp_norm",        "qkv_linear", "gdp_qkv"};
  const std::string allowed_text = fmt::format("{}", fmt::join(allowed, ", "));
  if (c.run.cpu_offloading)
    c.reject("offload.1", Exception::AssertionError, "fine_grained_activation_offloading", "true",
             "does not combine with cpu_offloading");
  if (c.run.offload_modules.empty())
    c.reject("offload.1", Exception::AssertionError, key, "[]",
             "fine-grained offload needs modules", allowed_text);
  for (const std::string& name : c.run.offload_modules)
    if (!contains(allowed, name))
      c.reject("offload.1", Exception::AssertionError, key, name, "unknown module", allowed_text,
               nearest(name, allowed));
  // Row 2.
  if (c.offloads("attn_proj") && !c.offloads("core_attn"))
    c.reject("offload.2", Exception::ValueError, key, "attn_proj", "needs core_attn in the list");
  if (c.offloads("gdp_qkv") && c.lists("gdp_in_proj"))
    c.reject("offload.2", Exception::ValueError, key, "gdp_qkv",
             "does not combine with recompute of gdp_in_proj");
  // Row 3.
  if (std::string name = first_of({"moe_act", "expert_fc1", "fused_group_mlp"});
      c.lists("moe") && !name.empty())
    c.reject("offload.3", Exception::AssertionError, key, name,
             "lies inside the recomputed module moe");
  // Row 4.
  if (o.min_offloaded_tensor_size < 0)
    c.reject("offload.4", Exception::AssertionError, "min_offloaded_tensor_size",
             number(o.min_offloaded_tensor_size), "is negative", ">= 0");
  if (!(o.activation_offload_fraction >= 0 && o.activation_offload_fraction <= 1))
    c.reject("offload.4", Exception::AssertionError, "activation_offload_fraction",
             number(o.activation_offload_fraction), "is no fraction", "0 to 1");
  if (o.delta_offload_bytes_across_pp_ranks < 0)
    c.reject("offload.4", Exception::AssertionError, "delta_offload_bytes_across_pp_ranks",
             number(o.delta_offload_bytes_across_pp_ranks), "is negative", ">= 0");
  // Row 5.
  if (c.offloads("fused_group_mlp") && !o.use_transformer_engine_op_fuser)
    c.reject("offload.5", Exception::ValueError, key, "fused_group_mlp",
             "needs use_transformer_engine_op_fuser");
  if (std::string name = first_of({"expert_fc1", "moe_act"});
      c.offloads("fused_group_mlp") && !name.empty())
    c.reject("offload.5", Exception::ValueError, key, fmt::format("fused_group_mlp, {}", name),
             fmt::format("fused_group_mlp already covers {}", name));
  // Row 6.
  if (c.run.cuda_graph_impl == "local") {
    for (const std::string& name : c.run.offload_modules)
      if (name != "expert_fc1" && name != "moe_act" && name != "fused_group_mlp")
        c.reject("offload.6", Exception::AssertionError, key, name,
                 "cannot be offloaded under local CUDA graphs",
                 "expert_fc1, moe_act, fused_group_mlp");
    if (c.captures_whole_layers())
      c.reject("offload.6", Exception::AssertionError, "cuda_graph_scope", "[]",
               "offload inside a captured layer");
    else if (c.captured("moe"))
      c.reject("offload.6", Exception::AssertionError, "cuda_graph_scope", "moe",
               "offload inside a captured module");
    if (o.cuda_graph_warmup_steps <= 0)
      c.reject("offload.6", Exception::AssertionError, "cuda_graph_warmup_steps",
               number(o.cuda_graph_warmup_steps), "offload needs warm-up steps", ">= 1");
  }
  if (c.run.cuda_graph_impl == "full_iteration" && o.max_inflight_offloads.value_or(-1) < 0)
    c.reject("offload.6", Exception::AssertionError, "max_inflight_offloads",
             o.max_inflight_offloads ? number(*o.max_inflight_offloads) : "null",
             "full-iteration graphs need a bound", ">= 0");
  // Row 7.
  if (c.run.overlap_moe_expert_parallel_comm && o.moe_flex_dispatcher_backend == "ncclep" &&
      c.offloads("expert_fc1"))
    c.reject("offload.7", Exception::AssertionError, key, "expert_fc1",
             "does not combine with the ncclep dispatcher under expert overlap");
}

} // namespace gdn::model::rules
