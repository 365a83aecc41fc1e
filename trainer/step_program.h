#pragma once
#include <memory>

#include "plan/workload.h"
#include "program/program.h"

namespace gdn::trainer {

// The program of one step on one pipeline rank: the very units that gdnplan counts, for every micro-batch.
// The workload must outlive it.
program::Program step_program(plan::Workload& workload, const plan::Setting& setting, int micro_batches,
                              std::int64_t pipeline_rank = 0);
// The order in which it runs its chunks and micro-batches: 1F1B, interleaved with several chunks a rank.
std::vector<program::Slot> step_schedule(const config::Parallel& parallel, int micro_batches, std::int64_t pipeline_rank);

// Peak live bytes (above parameters, gradients and optimizer state) that the program predicts, and the
// run at which it occurs.
struct PredictedPeak {
  Bytes bytes = 0;
  CategoryBytes by = {};
  size_t run = 0;
};
PredictedPeak predicted_peak(const program::Program& program);

} // namespace gdn::trainer
