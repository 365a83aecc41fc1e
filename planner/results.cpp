#include "planner/results.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/describe/own.h"
#include "model/modules.h"
#include "model/validate.h"

namespace gdn::planner {

std::string percent(double share, int decimals) {
  const double value = std::fabs(share) < 5e-5 ? 0 : share * 100;
  return fmt::format("{:+.{}f} %", value, decimals);
}

void require_legal(const Case& c, const plan::Setting& setting) {
  for (const model::Violation& v : model::validate(c.profile.model, setting.applied_to(c.profile.run)))
    if (v.verdict == model::Verdict::Rejected)
      throw Error(ErrorCode::Config, model::describe(v), "`gdnplan check` lists every violation");
  if (!c.profile.model.parameters_only)
    plan::Workload(c.profile.model, c.profile.run, kernels::provider_of(c.profile.run.stack)).require_known_ops(setting);
}

Json json_head(const char* schema, const Case& c, const std::string& modules) {
  const config::Run& run = c.profile.run;
  Json j;
  j["schema"] = schema;
  j["model"] = c.profile.model.name;
  j["hardware"] = c.hardware.name;
  j["stack"] = run.stack;
  j["build"] = std::string(config::name_of(run.build));
  j["revision"] = run.revision.text();
  j["modules"] = modules;
  j["run"] = {{"source", run.source}, {"overrides", c.overrides}, {"gpus", run.parallel.gpus}, {"tp", run.parallel.tp}, {"cp", run.parallel.cp},
              {"pp", run.parallel.pp}, {"vp", run.parallel.vp}, {"ep", run.parallel.ep}, {"etp", run.parallel.etp},
              {"sequence_parallel", run.parallel.sequence_parallel}, {"micro_batch_size", run.micro_batch},
              {"global_batch_size", run.global_batch}, {"seq_length", run.seq},
              {"l2norm", std::string(config::name_of(run.l2norm))}};
  return j;
}

Json json_assumptions(const std::vector<cost::Assumption>& assumptions) {
  Json j = Json::array();
  for (const auto& a : assumptions) j.push_back({{"key", a.key}, {"text", a.text}});
  return j;
}

Json json_notices(const std::vector<plan::Notice>& notices) {
  Json j = Json::array();
  for (const auto& n : notices) j.push_back({{"key", n.key}, {"text", n.text}});
  return j;
}

Json json_categories(const CategoryBytes& categories) {
  Json j;
  for (int i = 0; i < kCategoryCount; ++i) {
    const Category c = static_cast<Category>(i);
    j[std::string(name_of(c))] = categories[c];
  }
  return j;
}

Json json_throughput(const plan::Estimate& e) {
  return {{"step_seconds", e.step_seconds}, {"tokens_per_second", e.tokens_per_second},
          {"tokens_per_second_per_gpu", e.tokens_per_second_per_gpu}, {"model_tflops_per_gpu", e.model_tflops_per_gpu},
          {"mfu", e.mfu}, {"hfu", e.hfu}, {"recompute_seconds", e.recompute_seconds},
          {"reduce_seconds", e.reduce_seconds}, {"optimizer_seconds", e.optimizer_seconds}, {"bubble", e.bubble}};
}

void add_run(report::Document& d, const Case& c) {
  const config::Run& r = c.profile.run;
  const config::Parallel& p = r.parallel;
  std::string sizes;
  auto size = [&](const char* name, std::int64_t n) {
    if (n > 1) sizes += fmt::format("{}{} {}", sizes.empty() ? "" : ", ", name, n);
  };
  size("TP", p.tp);
  if (p.sequence_parallel && p.tp > 1) sizes += " with SP";
  size("CP", p.cp);
  size("PP", p.pp);
  size("VP", p.vp);
  size("EP", p.ep);
  size("ETP", p.etp);
  size("DP", p.dp());
  const bool megatron = r.stack == "megatron";
  d.pairs({{"model", c.profile.model.name},
           {"GPUs", fmt::format("{} x {}, {}", p.gpus, c.hardware.name, sizes.empty() ? "no parallelism" : sizes)},
           {"batch", fmt::format("{} x {} tokens a micro-batch, {} sequences a step", r.micro_batch, format_count(r.seq), r.global_batch)},
           {"stack", megatron ? fmt::format("megatron, build {}, revision {}, L2 norm in {}", config::name_of(r.build), r.revision.text(),
                                            r.l2norm == config::L2Norm::Off ? "neither" : std::string(config::name_of(r.l2norm)))
                              : "native"},
           {"run", (r.source.empty() ? "given by flags" : r.source) + (c.overrides.empty() ? "" : "; changed: " + join(c.overrides, ", "))}});
}

void add_notices(report::Document& d, const std::vector<plan::Notice>& notices) {
  if (notices.empty()) return;
  d.heading("Notices");
  for (const auto& n : notices) d.line("- " + n.text, report::Tone::Plain, 2);
}

void add_assumptions(report::Document& d, const std::vector<cost::Assumption>& assumptions) {
  if (assumptions.empty()) return;
  d.heading("Assumptions");
  for (const auto& a : assumptions) d.line("- " + a.text, report::Tone::Dim, 2);
}

config::Profile profile_identity(const Case& c) {
  const config::Run& run = c.profile.run;
  config::Profile p;
  p.identity = {{"model", c.profile.model.name}, {"run", run.source}, {"stack", run.stack},
                {"build", std::string(config::name_of(run.build))}, {"revision", run.revision.text()},
                {"provider", std::string(kernels::provider_of(run.stack).name())}, {"hardware", c.hardware.name},
                {"kind", "predicted"}, {"program", "gdnplan"}};
  return p;
}

config::Profile make_profile(const Case& c, const std::vector<plan::Estimate>& estimates, plan::Estimator* estimator) {
  config::Profile p = profile_identity(c);
  for (const plan::Estimate& e : estimates) {
    config::ProfileSet set{e.setting.text(), {}};
    auto row = [&](std::string key, double value, const char* unit) {
      set.rows.push_back({std::move(key), value, unit, "predicted"});
    };
    row("memory.allocated_bytes", static_cast<double>(e.peak_bytes), "bytes");
    row("memory.reserved_bytes", static_cast<double>(e.peak_bytes + e.allocator_bytes), "bytes");
    for (const plan::RankEstimate& r : e.ranks)
      if (e.ranks.size() > 1) row(fmt::format("ranks.{}.allocated_bytes", r.rank), static_cast<double>(r.peak.bytes), "bytes");
    row("memory.total_bytes", static_cast<double>(e.total_bytes), "bytes");
    for (int i = 0; i < kCategoryCount; ++i) {
      const Category k = static_cast<Category>(i);
      row(fmt::format("categories.{}", name_of(k)), static_cast<double>(e.categories[k]), "bytes");
    }
    row("time.step_seconds", e.step_seconds, "seconds");
    row("time.recompute_seconds", e.recompute_seconds, "seconds");
    row("throughput.tokens_per_second", e.tokens_per_second, "tokens/s");
    row("throughput.model_tflops_per_gpu", e.model_tflops_per_gpu, "TFLOP/s");
    if (estimator) {
      std::vector<std::string> seen;
      for (const plan::LayerEstimate& l : estimator->layers(e.setting)) {
        if (std::find(seen.begin(), seen.end(), l.kind) != seen.end()) continue;
        seen.push_back(l.kind);
        row(fmt::format("layers.{}.retained_bytes", l.kind), static_cast<double>(l.retained), "bytes");
        row(fmt::format("layers.{}.forward_seconds", l.kind), l.forward, "seconds");
        row(fmt::format("layers.{}.backward_seconds", l.kind), l.backward, "seconds");
        row(fmt::format("layers.{}.replay_seconds", l.kind), l.replay, "seconds");
      }
    }
    p.sets.push_back(std::move(set));
  }
  return p;
}

} // namespace gdn::planner
