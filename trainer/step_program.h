#pragma once
#include <memory>

#include "plan/workload.h"
#include "program/program.h"

namespace gdn::trainer {

// The program of one step on one rank: the very units that gdnplan counts, for every micro-batch.
// The workload must outlive it.
program::Program step_program(plan::Workload& workload, const plan::Setting& setting, int micro_batches);

// Peak live bytes (above parameters, gradients and optimizer state) that the program predicts, and the
// run at which it occurs.
struct PredictedPeak {
  Bytes bytes = 0;
  CategoryBytes by = {};
  size_t run = 0;
};
PredictedPeak predicted_peak(const program::Program& program);

} // namespace gdn::trainer
