#include "model/validate.h"

#include <algorithm>

#include <fmt/core.h>

#include "model/rules/check.h"

namespace gdn::model {

std::string_view name_of(Exception exception) {
  switch (exception) {
  case Exception::AssertionError: return "AssertionError";
  case Exception::ValueError: return "ValueError";
  case Exception::NotImplementedError: return "NotImplementedError";
  case Exception::ImportError: return "ImportError";
  case Exception::RuntimeError: return "RuntimeError";
  case Exception::Warning: return "warning";
  case Exception::Plan: return "configuration error";
  }
  return "?";
}

std::string describe(const Violation& v) {
  std::string text =
      fmt::format("{}: {} = {}: {}", name_of(v.exception), v.key, v.value, v.message);
  if (!v.allowed.empty()) text += fmt::format("; allowed: {}", v.allowed);
  if (v.hint.find(' ') == std::string::npos && !v.hint.empty()) text += fmt::format("; did you mean '{}'?", v.hint);
  else if (!v.hint.empty()) text += fmt::format("; {}", v.hint);
  return text;
}

bool any_rejected(const std::vector<Violation>& violations) {
  return std::any_of(violations.begin(), violations.end(),
                     [](const Violation& v) { return v.verdict == Verdict::Rejected; });
}

std::vector<Violation> validate(const config::Model& model, const config::Run& run) {
  rules::Check c(model, run);
  const config::Parallel& p = run.parallel;
  for (auto [key, value] : {std::pair{"tensor_model_parallel_size", p.tp},
                            {"context_parallel_size", p.cp},
                            {"pipeline_model_parallel_size", p.pp},
                            {"virtual_pipeline_model_parallel_size", p.vp},
                            {"expert_model_parallel_size", p.ep},
                            {"expert_tensor_parallel_size", p.etp},
                            {"gpus", p.gpus},
                            {"micro_batch_size", run.micro_batch},
                            {"global_batch_size", run.global_batch},
                            {"seq_length", run.seq}})
    if (value < 1)
      c.reject("parallel.positive", Exception::AssertionError, key, fmt::format("{}", value),
               "must be positive", ">= 1");
  if (!c.found.empty()) return c.found; // nothing else can be computed

  rules::check_arguments(c);
  rules::check_variant_and_heads(c);
  rules::check_gdn_dimensions(c);
  rules::check_recompute(c);
  if (c.megatron) {
    rules::check_offload(c);
    rules::check_cuda_graphs(c);
    rules::check_expert_overlap(c);
  }
  rules::check_overlap(c);
  rules::check_optimizer(c);
  rules::check_construction(c);
  rules::check_forward(c);
  return c.found;
}

} // namespace gdn::model
