#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "core/error.h"
#include "model/parameters.h"
#include "model/rules/check.h"

// Optimizer settings, how layers, experts and widths divide, and errors of the first step.
namespace gdn::model::rules {

namespace {

// Even split, or an explicit layout. MTP is not in the layer count: it sits on the last stage.
void check_pipeline(Check& c) {
  const config::Parallel& p = c.run.parallel;
  const std::int64_t layers = c.model.layers();
  if (!p.layout.empty()) {
    const std::int64_t sum = std::accumulate(p.layout.begin(), p.layout.end(), std::int64_t{0});
    const bool negative =
        std::any_of(p.layout.begin(), p.layout.end(), [](std::int64_t n) { return n < 0; });
    if (negative || sum != layers || static_cast<std::int64_t>(p.layout.size()) != p.pp * p.vp)
      c.reject("parallel.layout", Exception::AssertionError, "pipeline_model_parallel_layout",
               fmt::format("[{}]", fmt::join(p.layout, ", ")),
               fmt::format("must name {} virtual stages (pp {} x vp {}) of {} layers together",
                           p.pp * p.vp, p.pp, p.vp, layers));
    return;
  }
  if (layers % p.pp != 0)
    c.reject("parallel.pp", Exception::AssertionError, "pipeline_model_parallel_size", number(p.pp),
             fmt::format("{} layers do not divide by {} stages", layers, p.pp), {},
             "give the layers of every stage with pipeline_model_parallel_layout");
  else if (layers / p.pp % p.vp != 0)
    c.reject(
        "parallel.vp", Exception::AssertionError, "virtual_pipeline_model_parallel_size",
        number(p.vp),
        fmt::format("{} layers a stage do not divide by {} virtual stages", layers / p.pp, p.vp),
        {}, "give the layers of every virtual stage with pipeline_model_parallel_layout");
}

// Sharded linears, beyond the heads.
void check_widths(Check& c) {
  const config::Parallel& p = c.run.parallel;
  auto divides = [&](const char* what, std::int64_t size, const char* key, std::int64_t degree) {
    if (size % degree != 0)
      c.reject("parallel.width", Exception::AssertionError, key, number(degree),
               fmt::format("does not divide {} = {}", what, size));
  };
  if (c.has_dense) divides("ffn_hidden_size", c.model.ffn, "tensor_model_parallel_size", p.tp);
  if (c.has_moe) {
    divides("moe_ffn_hidden_size", c.model.moe.ffn, "expert_tensor_parallel_size", p.etp);
    divides("moe_shared_expert_intermediate_size", c.model.moe.shared_ffn,
            "tensor_model_parallel_size", p.tp);
  }
  divides("the vocabulary", padded_vocabulary(c.model, c.run), "tensor_model_parallel_size", p.tp);
}

} // namespace

void check_optimizer(Check& c) {
  const config::Optimizer& o = c.run.optimizer;
  if (o.precision_aware) {
    if (!o.distributed)
      c.reject("optimizer.1", Exception::AssertionError, "use_precision_aware_optimizer", "true",
               "needs the distributed optimizer");
    return;
  }
  for (auto [key, dtype] : {std::pair{"main_params_dtype", o.master_dtype},
                            {"exp_avg_dtype", o.moment1_dtype},
                            {"exp_avg_sq_dtype", o.moment2_dtype}})
    if (dtype != DType::FP32)
      c.reject("optimizer.2", Exception::AssertionError, key, std::string(name_of(dtype)),
               "needs use_precision_aware_optimizer", "fp32");
}

void check_construction(Check& c) {
  const config::Parallel& p = c.run.parallel;
  check_pipeline(c);
  if (c.has_moe && c.model.moe.experts % p.ep != 0)
    c.reject("parallel.experts", Exception::AssertionError, "expert_model_parallel_size",
             number(p.ep),
             fmt::format("does not divide num_moe_experts = {}", c.model.moe.experts));
  if (!c.has_moe && p.ep > 1)
    c.reject("parallel.experts", Exception::ValueError, "expert_model_parallel_size", number(p.ep),
             "the model has no experts", "1");
  check_widths(c);
  check_gdn_construction(c);
}

namespace {

// megatron-core's interleaved schedule (schedules.py), and ours: groups of pp micro-batches go through all chunks.
void check_interleaved(Check& c) {
  const config::Parallel& p = c.run.parallel;
  if (p.vp == 1 || p.dp() < 1) return; // the world's rule has said so
  const std::int64_t m = c.run.micro_batches(), group = c.run.micro_batch * p.dp() * p.pp;
  if (m >= p.pp && m % p.pp == 0) return;
  c.reject("parallel.interleaved", m < p.pp ? Exception::ValueError : Exception::RuntimeError, "global_batch_size", number(c.run.global_batch),
           fmt::format("{} micro-batches do not divide into groups of pp = {}, which virtual stages need", m, p.pp),
           fmt::format("a multiple of micro_batch x dp x pp = {}", group));
}

// Transformer Engine's exchange of sequence for heads.
void check_exchanged_heads(Check& c) {
  const config::Parallel& p = c.run.parallel;
  if (!c.has_attention || p.cp == 1 || c.run.cp_comm_type != "a2a") return;
  const std::int64_t heads = c.model.attention.heads / p.tp, kv = std::max<std::int64_t>(1, c.model.attention.kv_heads / p.tp);
  if (heads % p.cp != 0 || kv % p.cp != 0)
    c.reject("parallel.cp_heads", Exception::AssertionError, "cp_comm_type", "a2a",
             fmt::format("{} attention and {} key-value heads of a tensor-parallel rank do not divide by cp = {}", heads, kv, p.cp),
             "p2p, all_gather");
}

} // namespace

void check_forward(Check& c) {
  const config::Parallel& p = c.run.parallel;
  check_interleaved(c);
  check_exchanged_heads(c);
  if (c.has_moe && p.tp > 1 && !p.sequence_parallel)
    c.reject("parallel.moe_sp", Exception::ValueError, "sequence_parallel", "false",
             fmt::format("training MoE layers with tp = {} needs sequence parallelism", p.tp),
             "true");
  if (p.sequence_parallel && p.tp > 1 && c.run.seq / p.cp % p.tp != 0)
    c.reject("parallel.seq_sp", Exception::AssertionError, "seq_length", number(c.run.seq),
             fmt::format("{} tokens of a context-parallel rank do not divide by tp = {}",
                         c.run.seq / p.cp, p.tp));
  check_gdn_forward(c);
  if (c.megatron && c.full && c.model.mtp_layers > 0 && c.run.train_mtp) { // row 29
    const config::Recompute& r = c.run.recompute;
    if (r.method == "uniform" && r.num_layers.value_or(1) != 1)
      c.reject("recompute.29", Exception::AssertionError, "recompute_num_layers",
               number(*r.num_layers), "multi-token prediction recomputes one layer at a time", "1");
    if (r.method == "block")
      c.warn("recompute.29", "recompute_method", "block", "MTP layers are not recomputed");
  }
  const bool checkpoints = c.full || !c.modules.empty();
  if (c.megatron && checkpoints && c.settings.autograd_grad) // row 30
    c.reject("recompute.30", Exception::RuntimeError, "autograd_grad", "true",
             "checkpoints work with .backward() only, not with .grad()");
}

} // namespace gdn::model::rules
