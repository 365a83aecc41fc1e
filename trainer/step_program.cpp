#include "trainer/step_program.h"

#include <fmt/core.h>

#include "core/error.h"
#include "model/stages.h"

namespace gdn::trainer {

std::vector<program::Slot> step_schedule(const config::Parallel& p, int micro_batches, std::int64_t pipeline_rank) {
  return program::one_f_one_b(static_cast<int>(p.pp), static_cast<int>(pipeline_rank), static_cast<int>(p.vp), micro_batches);
}

program::Program step_program(plan::Workload& workload, const plan::Setting& setting, int micro_batches, std::int64_t pipeline_rank) {
  const config::Parallel& p = workload.run().parallel;
  std::vector<program::UnitInstance> units;
  for (const model::Chunk& chunk : model::chunks_of_rank(workload.model().layers(), p, pipeline_rank))
    for (const plan::PlacedUnit& u : workload.units(chunk, setting))
      units.push_back({u.unit->list, &u.unit->spans, &u.unit->trace, static_cast<int>(chunk.virtual_stage),
                       u.first_layer < 0 ? "" : fmt::format("layers.{}.", u.first_layer)});
  return program::Program(std::move(units), step_schedule(p, micro_batches, pipeline_rank), micro_batches);
}

PredictedPeak predicted_peak(const program::Program& program) {
  PredictedPeak peak;
  for (size_t r = 0; r < program.runs().size(); ++r)
    if (const auto& run = program.runs()[r]; run.level > peak.bytes) peak = {run.level, run.by, r};
  return peak;
}

} // namespace gdn::trainer
