#include "trainer/prediction.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"
#include "model/static_state.h"
#include "plan/plan.h"
#include "program/layout.h"
#include "trainer/executor.h"
#include "trainer/step_program.h"

namespace gdn::trainer {

namespace {

// Live buffers while run `at` executes, scratch included.
std::vector<std::pair<std::string, Bytes>> live_at(const program::Program& program, size_t at) {
  std::vector<char> live(program.buffers().size(), 0);
  for (size_t r = 0; r <= at; ++r) {
    for (int id : program.runs()[r].allocs) live[static_cast<size_t>(id)] = 1;
    if (r < at)
      for (int id : program.runs()[r].frees) live[static_cast<size_t>(id)] = 0;
  }
  std::vector<std::pair<std::string, Bytes>> rows;
  for (size_t id = 0; id < live.size(); ++id)
    if (live[id]) rows.push_back({program.buffer_name(static_cast<int>(id)), program.buffers()[id].bytes});
  if (Bytes scratch = program.runs()[at].by[Category::Workspace]) rows.push_back({"(scratch)", scratch});
  std::stable_sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.second > b.second; });
  return rows;
}

std::vector<std::vector<const program::UnitSummary*>> summaries(plan::Workload& workload, const plan::Setting& setting,
                                                                std::int64_t pipeline_rank) {
  std::vector<std::vector<const program::UnitSummary*>> chunks;
  for (const model::Chunk& c : model::chunks_of_rank(workload.model().layers(), workload.run().parallel, pipeline_rank)) {
    chunks.emplace_back();
    for (const plan::PlacedUnit& u : workload.units(c, setting)) chunks.back().push_back(&u.unit->summary);
  }
  return chunks;
}

} // namespace

Prediction predict(plan::Workload& workload, const plan::Setting& setting, const program::Program& program, std::int64_t pipeline_rank) {
  Prediction p;
  p.state = Parameters::bytes_of(model::static_state(workload.model(), workload.run(), pipeline_rank));
  const int micro_batches = static_cast<int>(workload.run().micro_batches());
  const program::Walk walk = program::walk(summaries(workload, setting, pipeline_rank), step_schedule(workload.run().parallel, micro_batches, pipeline_rank), p.state);
  p.peak_bytes = walk.overall.bytes;
  p.at_peak = walk.overall.by;
  const PredictedPeak flat = predicted_peak(program);
  if (flat.bytes + p.state.total() != p.peak_bytes)
    throw Error(ErrorCode::Internal, fmt::format("the composed peak of {} bytes differs from the program's {}", p.peak_bytes,
                                                 flat.bytes + p.state.total()));
  p.peak_event = program.run_name(program.runs()[flat.run]);
  p.largest = live_at(program, flat.run);
  program::LayoutOptions options;
  options.guard = kGuard;
  p.arena_bytes = program::lay_out(program, options).extent;
  return p;
}

namespace {

// Live peak of every legal setting without a layout: a lower bound of what it allocates.
std::vector<std::pair<Bytes, plan::Setting>> live_peaks(plan::Workload& workload, std::int64_t pipeline_rank) {
  const CategoryBytes state = Parameters::bytes_of(model::static_state(workload.model(), workload.run(), pipeline_rank));
  const int micro_batches = static_cast<int>(workload.run().micro_batches());
  std::vector<std::pair<Bytes, plan::Setting>> out;
  for (const plan::Setting& s : plan::legal_settings(workload, false))
    out.push_back({program::walk(summaries(workload, s, pipeline_rank), step_schedule(workload.run().parallel, micro_batches, pipeline_rank), state).overall.bytes, s});
  return out;
}

Bytes allocated(plan::Workload& workload, const plan::Setting& s, std::int64_t pipeline_rank) {
  return predict(workload, s, step_program(workload, s, static_cast<int>(workload.run().micro_batches()), pipeline_rank), pipeline_rank).total_bytes();
}

} // namespace

Fitting setting_that_fits(plan::Workload& workload, Bytes budget, std::int64_t pipeline_rank) {
  std::vector<std::pair<size_t, plan::Setting>> candidates; // fewest replays first
  for (const auto& [peak, s] : live_peaks(workload, pipeline_rank)) {
    if (peak > budget) continue;
    size_t replays = 0;
    for (const model::Chunk& c : model::chunks_of_rank(workload.model().layers(), workload.run().parallel, pipeline_rank))
      for (const plan::PlacedUnit& u : workload.units(c, s))
        for (const program::Event& e : u.unit->trace.events) replays += e.pass == program::Pass::Replay;
    candidates.push_back({replays, s});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](auto& a, auto& b) { return a.first < b.first; });
  for (const auto& [replays, s] : candidates)
    if (const Bytes bytes = allocated(workload, s, pipeline_rank); bytes <= budget) return {s.text(), bytes};
  return {};
}

Fitting smallest_setting(plan::Workload& workload, std::int64_t pipeline_rank) {
  const auto peaks = live_peaks(workload, pipeline_rank);
  const auto& least = *std::min_element(peaks.begin(), peaks.end(), [](auto& a, auto& b) { return a.first < b.first; });
  return {least.second.text(), allocated(workload, least.second, pipeline_rank)};
}

std::string does_not_fit(plan::Workload& workload, const plan::Setting& setting, const Prediction& p, Bytes budget,
                         std::int64_t pipeline_rank) {
  std::string text = fmt::format("'{}' needs {} ({} of parameters, gradients and optimizer, {} for activations and scratch), {} may be used; "
                                 "at the peak, {}, the largest tensors are",
                                 setting.text(), format_bytes(p.total_bytes()), format_bytes(p.state.total()),
                                 format_bytes(p.arena_bytes), format_bytes(budget), p.peak_event);
  for (size_t i = 0; i < std::min<size_t>(3, p.largest.size()); ++i)
    text += fmt::format("{} {} {}", i ? "," : "", p.largest[i].first, format_bytes(p.largest[i].second));
  const Fitting fits = setting_that_fits(workload, budget, pipeline_rank);
  if (!fits.setting.empty()) return text + fmt::format("; '{}' would fit with {}", fits.setting, format_bytes(fits.bytes));
  const Fitting least = smallest_setting(workload, pipeline_rank);
  return text + fmt::format("; no legal recompute setting fits: the smallest, '{}', needs {}, {} too many; take fewer tokens a micro-batch, "
                            "or a smaller model", least.setting, format_bytes(least.bytes), format_bytes(least.bytes - budget));
}

} // namespace gdn::trainer
