#include <set>

#include <fmt/core.h>

#include "model/validate.h"
#include "plan/search.h"

namespace gdn::plan {

namespace {

std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= n; ++d)
    if (n % d == 0) out.push_back(d);
  return out;
}

// Ways to store gradients and Adam's states: as the run does, bf16 gradients, the precision-aware
// optimizer with bf16 moments and masters as 2-byte remainders, and both.
std::vector<config::Optimizer> optimizers(const config::Optimizer& own, bool all) {
  std::vector<config::Optimizer> out{own};
  auto same = [](const config::Optimizer& a, const config::Optimizer& b) {
    return a.gradient_dtype == b.gradient_dtype && a.precision_aware == b.precision_aware &&
           a.master_dtype == b.master_dtype && a.moment1_dtype == b.moment1_dtype && a.moment2_dtype == b.moment2_dtype;
  };
  for (int form = 0; all && form < 4; ++form) {
    config::Optimizer o = own;
    o.gradient_dtype = form & 1 ? DType::BF16 : DType::FP32;
    o.precision_aware = form >= 2;
    o.master_dtype = o.moment1_dtype = o.moment2_dtype = o.precision_aware ? DType::BF16 : DType::FP32;
    bool known = false;
    for (const config::Optimizer& seen : out) known = known || same(seen, o);
    if (!known) out.push_back(o);
  }
  return out;
}

// Layers of each of `count` virtual stages where they do not divide: one more for the middle ones, so that the
// stages with the embedding and the loss are the lighter ones.
std::vector<std::int64_t> uneven_layout(std::int64_t layers, std::int64_t count) {
  std::vector<std::int64_t> out(static_cast<size_t>(count), layers / count);
  const std::int64_t more = layers % count, first = (count - more) / 2;
  for (std::int64_t i = first; i < first + more; ++i) ++out[static_cast<size_t>(i)];
  return out;
}

} // namespace

std::vector<config::Run> parallel_points(const config::Model& model, const config::Run& given, const SearchOptions& options) {
  std::vector<config::Run> points;
  config::Run run = Setting{}.applied_to(given);
  config::Parallel& p = run.parallel;
  const config::Parallel own = given.parallel;
  p.first_stage_layers = p.last_stage_layers = std::nullopt;
  const std::int64_t gpus = own.gpus, layers = model.layers();
  const bool moe = model.moe.experts > 0;
  // The run's own uneven layout comes up with its own pp and vp only.
  std::set<std::pair<std::int64_t, std::int64_t>> stages;
  for (std::int64_t pp : divisors(gpus)) {
    if (layers % pp == 0) {
      for (std::int64_t vp : divisors(layers / pp))
        if (vp == 1 || pp > 1) stages.insert({pp, vp});
    } else {
      for (std::int64_t vp = 1; pp * vp <= layers; vp *= 2) stages.insert({pp, vp});
    }
    if (pp == own.pp && !own.layout.empty()) stages.insert({pp, own.vp});
  }
  const std::vector<config::Optimizer> forms = optimizers(given.optimizer, options.optimizer_options);
  for (std::int64_t tp : divisors(gpus))
    for (std::int64_t cp : divisors(gpus / tp)) {
      p.tp = tp;
      p.cp = cp;
      p.sequence_parallel = tp > 1;
      for (const auto& [pp, vp] : stages) {
        if ((gpus / tp / cp) % pp != 0) continue;
        const std::int64_t dp = gpus / tp / cp / pp;
        if (run.global_batch % dp != 0) continue;
        p.pp = pp;
        p.vp = vp;
        p.layout = pp == own.pp && vp == own.vp ? own.layout : std::vector<std::int64_t>{};
        if (p.layout.empty() && layers % (pp * vp) != 0) p.layout = uneven_layout(layers, pp * vp);
        for (std::int64_t ep : divisors(moe ? gpus / pp : 1))
          for (std::int64_t etp : divisors(moe ? gpus / pp / ep : 1)) {
            p.ep = ep;
            p.etp = etp;
            for (std::int64_t mbs : divisors(run.global_batch / dp)) {
              if (options.micro_batch && mbs != *options.micro_batch) continue;
              run.micro_batch = mbs;
              for (const config::Optimizer& o : forms) {
                run.optimizer = o;
                if (!model::any_rejected(model::validate(model, run))) points.push_back(run);
              }
            }
          }
      }
    }
  return points;
}

std::vector<std::string> megatron_parallel_flags(const config::Model& model, const config::Run& run) {
  const config::Parallel& p = run.parallel;
  std::vector<std::string> flags;
  auto add = [&](const char* name, std::int64_t n) {
    flags.push_back(name);
    flags.push_back(fmt::format("{}", n));
  };
  add("--tensor-model-parallel-size", p.tp);
  if (p.sequence_parallel) flags.push_back("--sequence-parallel");
  add("--pipeline-model-parallel-size", p.pp);
  if (!p.layout.empty()) {
    std::string stages = "E"; // E embedding, t decoder layer, m MTP layer, L loss
    for (size_t i = 0; i < p.layout.size(); ++i) stages += fmt::format("{}t*{}", i ? "|" : "", p.layout[i]);
    flags.push_back("--pipeline-model-parallel-layout");
    flags.push_back(fmt::format("\"{}{}L\"", stages, std::string(static_cast<size_t>(run.train_mtp ? model.mtp_layers : 0), 'm')));
  } else if (p.vp > 1) {
    add("--num-virtual-stages-per-pipeline-rank", p.vp);
  }
  add("--context-parallel-size", p.cp);
  if (p.ep * p.etp > 1 || p.tp > 1) {
    add("--expert-model-parallel-size", p.ep);
    add("--expert-tensor-parallel-size", p.etp);
  }
  add("--micro-batch-size", run.micro_batch);
  add("--global-batch-size", run.global_batch);
  if (run.optimizer.distributed) flags.push_back("--use-distributed-optimizer");
  if (run.optimizer.gradient_dtype == DType::BF16) flags.push_back("--grad-reduce-in-bf16");
  if (run.optimizer.precision_aware) {
    flags.push_back("--use-precision-aware-optimizer");
    auto dtype = [&](const char* name, DType d) {
      flags.push_back(name);
      flags.push_back(d == DType::BF16 ? "bf16" : d == DType::FP32 ? "fp32" : std::string(name_of(d)));
    };
    dtype("--exp-avg-dtype", run.optimizer.moment1_dtype);
    dtype("--exp-avg-sq-dtype", run.optimizer.moment2_dtype);
  }
  return flags;
}

} // namespace gdn::plan
