#include "trainer/step_program.h"

#include <fmt/format.h>

#include "core/error.h"
#include "model/stages.h"

namespace gdn::trainer {

program::Program step_program(plan::Workload& workload, const plan::Setting& setting, int micro_batches) {
  const config::Parallel& p = workload.run().parallel;
  if (p.gpus != 1 || p.tp * p.cp * p.pp * p.vp * p.ep * p.etp != 1)
    throw Error(ErrorCode::Config, fmt::format("parallel: {} GPUs, tp {}, cp {}, pp {}, ep {}: this build executes one rank", p.gpus,
                                               p.tp, p.cp, p.pp, p.ep),
                "set gpus and every parallel size to 1");
  std::vector<program::UnitInstance> units;
  for (const model::Chunk& chunk : model::chunks_of_rank(workload.model().layers(), p, 0))
    for (const plan::PlacedUnit& u : workload.units(chunk, setting))
      units.push_back({u.unit->list, &u.unit->spans, &u.unit->trace, static_cast<int>(chunk.virtual_stage),
                       u.first_layer < 0 ? "" : fmt::format("layers.{}.", u.first_layer)});
  return program::Program(std::move(units), program::one_f_one_b(1, 0, 1, micro_batches), micro_batches);
}

PredictedPeak predicted_peak(const program::Program& program) {
  PredictedPeak peak;
  for (size_t r = 0; r < program.runs().size(); ++r)
    if (const auto& run = program.runs()[r]; run.level > peak.bytes) peak = {run.level, run.by, r};
  return peak;
}

} // namespace gdn::trainer
