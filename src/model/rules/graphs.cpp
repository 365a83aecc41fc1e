#include <fmt/format.h>

#include "core/error.h"
#include "model/rules/check.h"

// CUDA graphs (rows 27, then 23 to 26 of the recompute list) and expert-parallel overlap (row 28).
namespace gdn::model::rules {

void check_cuda_graphs(Check& c) {
  if (!c.graphs()) return;
  const std::string& impl = c.run.cuda_graph_impl;
  const std::vector<std::string> impls{"none", "local", "transformer_engine", "full_iteration"};
  if (!contains(impls, impl))
    c.reject("graphs.impl", Exception::AssertionError, "cuda_graph_impl", impl,
             "is no implementation", fmt::format("{}", fmt::join(impls, ", ")),
             nearest(impl, impls));
  const std::vector<std::string> scopes{"attn",           "mlp",   "moe",           "moe_router",
                                        "moe_preprocess", "mamba", "full_iteration"};
  for (const std::string& scope : c.run.cuda_graph_scope)
    if (!contains(scopes, scope))
      c.reject("graphs.scope", Exception::AssertionError, "cuda_graph_scope", scope, "is no scope",
               fmt::format("{}", fmt::join(scopes, ", ")), nearest(scope, scopes));

  if (c.run.cpu_offloading && impl != "full_iteration")
    c.reject("recompute.27", Exception::ValueError, "cpu_offloading", "true",
             fmt::format("does not combine with {} CUDA graphs", impl),
             "cuda_graph_impl full_iteration");
  if (c.full && impl != "full_iteration")
    c.reject("recompute.23", Exception::AssertionError, "cuda_graph_impl", impl,
             "full recompute works with full-iteration graphs only", "full_iteration, none");
  if (impl == "transformer_engine" && c.lists("moe") &&
      contains(c.run.cuda_graph_scope, "moe_router"))
    c.reject("recompute.24", Exception::AssertionError, "recompute_modules", "moe",
             "the recomputed module covers the captured moe_router");
  // Row 25: a captured replay cannot draw random numbers.
  if (c.lists("core_attn") && c.captured("attn") && c.run.attention_dropout > 0)
    c.reject("recompute.25", Exception::AssertionError, "attention_dropout",
             number(c.run.attention_dropout),
             "does not combine with captured recompute of core_attn", "0");
  for (const char* name : {"mlp", "moe"})
    if (c.lists(name) && c.captured(name) && c.run.hidden_dropout > 0)
      c.reject("recompute.25", Exception::AssertionError, "hidden_dropout",
               number(c.run.hidden_dropout),
               fmt::format("does not combine with captured recompute of {}", name), "0");
  if (c.lists("moe") && c.captured("moe") && c.settings.moe_input_jitter_eps)
    c.reject("recompute.25", Exception::AssertionError, "moe_input_jitter_eps",
             number(*c.settings.moe_input_jitter_eps),
             "does not combine with captured recompute of moe", "null");
  // Row 26: the shared expert is captured with the router unless it overlaps.
  const bool shared_captured =
      !c.run.overlap.shared_experts && (c.captured("moe_router") || c.captured("moe"));
  if (c.settings.gtp > 1 && impl == "local" && (c.fp8 || c.run.fp4) && shared_captured &&
      c.lists("shared_experts"))
    c.reject("recompute.26", Exception::AssertionError, "recompute_modules", "shared_experts",
             "the captured shared expert cannot be recomputed under fp8 or fp4 with GTP");
}

void check_expert_overlap(Check& c) {
  if (!c.run.overlap_moe_expert_parallel_comm) return;
  const config::Recompute& r = c.run.recompute;
  const config::Parallel& p = c.run.parallel;
  auto reject = [&](const char* key, std::string value, const char* message,
                    const char* allowed = "") {
    c.reject("recompute.28", Exception::AssertionError, key, std::move(value),
             fmt::format("overlap_moe_expert_parallel_comm: {}", message), allowed);
  };
  if (!version_at_least(c.settings.torch_version, "2.6"))
    reject("torch_version", c.settings.torch_version, "needs PyTorch 2.6", ">= 2.6");
  if (p.pp > 1 && p.vp == 1)
    reject("virtual_pipeline_model_parallel_size", "1", "pipeline parallelism needs virtual stages",
           "> 1");
  if (p.ep == 1)
    reject("expert_model_parallel_size", "1", "there is no expert parallelism to overlap", "> 1");
  if (c.run.moe_token_dispatcher != "alltoall" && c.run.moe_token_dispatcher != "flex")
    reject("moe_token_dispatcher_type", c.run.moe_token_dispatcher, "unsupported dispatcher",
           "alltoall, flex");
  if (c.full)
    reject("recompute_granularity", "full", "full recompute is not supported", "none, selective");
  if (!r.method.empty()) reject("recompute_method", r.method, "no method may be set", "unset");
  if (r.num_layers)
    reject("recompute_num_layers", number(*r.num_layers), "no layer count may be set", "unset");
  // Tested whatever the granularity is.
  if (c.lists("moe") || (r.modules && contains(*r.modules, "moe")))
    reject("recompute_modules", "moe", "whole-MoE recompute cannot be combined");
  if (c.run.dtype != DType::BF16 && c.run.dtype != DType::FP16)
    reject("params_dtype", std::string(name_of(c.run.dtype)), "needs 16-bit training",
           "bf16, fp16");
  if (c.run.train_mtp && c.model.mtp_layers > 1)
    reject("mtp_num_hidden_layers", number(c.model.mtp_layers), "at most one MTP layer", "0, 1");
}

// Megatron-LM's argument checks (training/arguments.py, transformer_config.py, main d98e8a64); what they ask for holds
// for the same overlap of any stack.
void check_overlap(Check& c) {
  const config::Overlap& o = c.run.overlap;
  if (o.shared_experts && c.run.overlap_moe_expert_parallel_comm)
    c.reject("recompute.28", Exception::AssertionError, "moe_shared_expert_overlap", "true",
             "overlap_moe_expert_parallel_comm: both overlaps cannot be combined", "false");
  if (o.shared_experts && c.run.moe_token_dispatcher == "allgather")
    c.reject("overlap.shared", Exception::ValueError, "moe_token_dispatcher_type", "allgather",
             "moe_shared_expert_overlap works beside the exchanges of the alltoall dispatcher only", "alltoall");
  if (o.tensor && c.megatron && c.run.build == config::Build::Local)
    c.reject("overlap.local", Exception::Plan, "tp_comm_overlap", "true",
             "the user buffers are Transformer Engine's: layers of the local build overlap nothing", "false", "build: te");
  if (o.tensor && !c.run.parallel.sequence_parallel)
    c.reject("overlap.tensor", Exception::AssertionError, "tp_comm_overlap", "true", "tensor-parallel overlap needs sequence parallelism", "false",
             "sequence_parallel: true");
  if (o.parameters && !c.run.optimizer.distributed)
    c.reject("overlap.parameters", Exception::AssertionError, "overlap_param_gather", "true", "only the distributed optimizer gathers parameters", "false");
  if (o.parameters && !o.gradients)
    c.reject("overlap.parameters", Exception::AssertionError, "overlap_param_gather", "true", "needs overlap_grad_reduce", "false", "overlap_grad_reduce: true");
  if (o.delayed_wgrad && !c.run.overlap_moe_expert_parallel_comm)
    c.reject("overlap.wgrad", Exception::AssertionError, "delay_wgrad_compute", "true", "needs overlap_moe_expert_parallel_comm", "false",
             "overlap_moe_expert_parallel_comm: true");
}

} // namespace gdn::model::rules
