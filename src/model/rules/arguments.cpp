#include <fmt/core.h>

#include "model/rules/check.h"

// Command line and world size: what the stack checks before it builds its configuration object.
namespace gdn::model::rules {

void check_arguments(Check& c) {
  const config::Parallel& p = c.run.parallel;
  const config::Recompute& r = c.run.recompute;

  if (c.megatron && r.granularity == config::Granularity::Selective && !r.method.empty())
    c.reject("recompute.21", Exception::AssertionError, "recompute_method", r.method,
             "a method belongs to full granularity", "unset", "remove it, or set granularity full");
  if (c.megatron && c.run.distribute_saved_activations &&
      (p.tp == 1 || !c.full || r.method.empty()))
    c.reject("recompute.22", Exception::AssertionError, "distribute_saved_activations", "true",
             fmt::format("needs tp > 1 (tp = {}), full granularity and a method", p.tp));

  const std::int64_t model_size = p.tp * p.cp * p.pp;
  if (p.gpus % model_size != 0)
    c.reject("parallel.world", Exception::RuntimeError, "gpus", number(p.gpus),
             fmt::format("is not a multiple of tp x cp x pp = {} x {} x {} = {}", p.tp, p.cp, p.pp,
                         model_size));
  const std::int64_t expert_size = p.ep * p.etp * p.pp;
  if (p.gpus % expert_size != 0)
    c.reject("parallel.expert_world", Exception::RuntimeError, "gpus", number(p.gpus),
             fmt::format("is not a multiple of ep x etp x pp = {} x {} x {} = {}", p.ep, p.etp,
                         p.pp, expert_size));

  if (p.gpus % model_size == 0) {
    const std::int64_t per_step = c.run.micro_batch * p.dp();
    if (c.run.global_batch % per_step != 0)
      c.reject("parallel.batch", Exception::AssertionError, "global_batch_size",
               number(c.run.global_batch),
               fmt::format("is not a multiple of micro_batch x dp = {} x {} = {}",
                           c.run.micro_batch, p.dp(), per_step));
  }
  if (p.cp > 1 && !c.settings.packed && c.run.seq % (2 * p.cp) != 0)
    c.reject("parallel.seq_cp", Exception::AssertionError, "seq_length", number(c.run.seq),
             fmt::format("does not divide by 2 x cp = {}: load-balanced context parallelism gives "
                         "each rank two pieces",
                         2 * p.cp));
  if (p.vp > 1 && p.pp == 1)
    c.reject("parallel.vp", Exception::AssertionError, "virtual_pipeline_model_parallel_size",
             number(p.vp), "virtual pipelining needs pp > 1");
}

} // namespace gdn::model::rules
