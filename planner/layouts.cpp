#include "planner/layouts.h"

#include <fmt/format.h>

#include "config/run_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "planner/progress.h"
#include "planner/results.h"

namespace gdn::planner {

std::string layout_text(const config::Run& run, bool optimizer) {
  const config::Parallel& p = run.parallel;
  std::string text;
  auto size = [&](const char* name, std::int64_t n) {
    if (n > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, n);
  };
  size("TP", p.tp);
  size("CP", p.cp);
  size("PP", p.pp);
  size("VP", p.vp);
  if (!p.layout.empty()) text += fmt::format(" of {} layers", fmt::join(p.layout, "-"));
  size("EP", p.ep);
  size("ETP", p.etp);
  size("DP", p.dp());
  text += fmt::format("{}micro-batch {}", text.empty() ? "" : ", ", run.micro_batch);
  if (optimizer && run.optimizer.gradient_dtype == DType::BF16) text += ", bf16 gradients";
  if (optimizer && run.optimizer.precision_aware) text += ", precision-aware optimizer";
  return text;
}

void add_layout(report::Document& d, const config::Model& model, const config::Run& run, const plan::Estimate& e) {
  d.line(fmt::format("{} tokens/s ({} a GPU), {:.0f} TFLOP/s a GPU, MFU {:.1f} %, step {}",
                     format_count(static_cast<std::int64_t>(e.tokens_per_second)),
                     format_count(static_cast<std::int64_t>(e.tokens_per_second_per_gpu)), e.model_tflops_per_gpu, e.mfu * 100,
                     format_seconds(e.step_seconds)), report::Tone::Plain, 2);
  d.line(fmt::format("{} allocated on rank {}, {} of {} with context and allocator{}; peak at {}", format_gib(e.peak_bytes),
                     e.worst_rank().rank, format_gib(e.total_bytes), format_gib(e.budget_bytes), e.tight ? " (tight)" : "",
                     e.worst_rank().peak_event), report::Tone::Plain, 2);
  if (run.stack != "megatron") return;
  d.line("Megatron-LM:", report::Tone::Dim, 2);
  d.verbatim(join(plan::megatron_parallel_flags(model, run)), 4);
  if (const std::vector<std::string> flags = plan::megatron_flags(e.setting); !flags.empty()) d.verbatim(join(flags), 4);
}

Json json_layout(const config::Model& model, const config::Run& run, const plan::Estimate& e) {
  const config::Parallel& p = run.parallel;
  std::vector<std::string> flags;
  if (run.stack == "megatron") {
    flags = plan::megatron_parallel_flags(model, run);
    for (const std::string& f : plan::megatron_flags(e.setting)) flags.push_back(f);
  }
  return {{"gpus", p.gpus}, {"tp", p.tp}, {"cp", p.cp}, {"pp", p.pp}, {"vp", p.vp}, {"ep", p.ep}, {"etp", p.etp}, {"dp", p.dp()},
          {"seq_length", run.seq}, {"micro_batch_size", run.micro_batch}, {"global_batch_size", run.global_batch},
          {"setting", e.setting.text()}, {"modules", e.setting.modules}, {"peak_bytes", e.peak_bytes}, {"total_bytes", e.total_bytes},
          {"fits", e.fits}, {"step_seconds", e.step_seconds}, {"tokens_per_second", e.tokens_per_second}, {"mfu", e.mfu},
          {"peak_rank", e.worst_rank().rank}, {"peak_event", e.worst_rank().peak_event}, {"flags", flags}};
}

std::string yaml_layout(const config::Run& given, const std::string& why) {
  config::Run run = given;
  run.source = "ours: " + why;
  return config::to_yaml(config::to_node(run));
}

namespace {

std::string question(plan::Unknown u, const Case& c) {
  const std::string budget = format_gib(c.budget.value_or(c.hardware.memory));
  switch (u) {
  case plan::Unknown::Seq: return "Longest sequence that fits " + budget;
  case plan::Unknown::MicroBatch: return "Largest micro-batch that fits " + budget;
  case plan::Unknown::Gpus: return "Fewest GPUs that fit " + budget + " each";
  case plan::Unknown::Budget: return "Least memory a GPU must have";
  }
  return "";
}

std::string answer(plan::Unknown u, std::int64_t value) {
  switch (u) {
  case plan::Unknown::Seq: return format_count(value) + " tokens";
  case plan::Unknown::MicroBatch: return fmt::format("{} sequence{}", value, value == 1 ? "" : "s");
  case plan::Unknown::Gpus: return fmt::format("{} GPUs", format_count(value));
  case plan::Unknown::Budget: return format_gib(value);
  }
  return "";
}

} // namespace

int run_solve(const Case& c, const std::string& unknown, plan::Freedom freedom, const OutputOptions& output) {
  const plan::Unknown u = plan::parse_unknown(unknown);
  plan::SolveOptions options;
  options.budget = c.budget;
  plan::Solved s;
  {
    Progress progress;
    options.progress = [&](double share, const char* what) { progress(share, what); };
    s = plan::solve(c.profile.model, c.profile.run, c.hardware, u, freedom, options);
  }
  Output out;
  add_run(out.text, c);
  if (s.solution) {
    out.text.heading(fmt::format("{}: {}", question(u, c), answer(u, s.solution->value)));
    out.text.line(fmt::format("with {}; recompute {}", layout_text(s.solution->run), s.solution->estimate.setting.text()), report::Tone::Strong, 2);
    plan::Estimate e = s.solution->estimate;
    if (u == plan::Unknown::Budget) e.budget_bytes = e.total_bytes, e.tight = false;
    add_layout(out.text, c.profile.model, s.solution->run, e);
  } else {
    out.text.heading(question(u, c) + ": none");
    out.text.line("no value fits, whatever the recompute setting allowed here", report::Tone::Bad, 2);
  }
  out.text.line(fmt::format("{} values priced{}; {}", s.tried, s.skipped ? fmt::format(", {} illegal", s.skipped) : "", s.guard), report::Tone::Dim, 2);
  out.json = [&] {
    Json j = json_head("gdnplan.solve/1", c, s.solution ? s.solution->estimate.setting.text() : "");
    j["solve"] = unknown;
    j["value"] = s.solution ? Json(s.solution->value) : Json(nullptr);
    j["answer"] = s.solution ? json_layout(c.profile.model, s.solution->run, s.solution->estimate) : Json(nullptr);
    j["tried"] = s.tried;
    j["illegal"] = s.skipped;
    j["guard"] = s.guard;
    j["assumptions"] = Json::array();
    j["notices"] = Json::array();
    return j;
  };
  out.yaml = [&] {
    if (!s.solution) throw Error(ErrorCode::DoesNotFit, "no value fits: there is no run to write");
    return yaml_layout(s.solution->run, fmt::format("gdnplan --solve {} on {}", unknown, c.hardware.name));
  };
  write(out, output);
  return s.solution ? 0 : 3;
}

} // namespace gdn::planner
