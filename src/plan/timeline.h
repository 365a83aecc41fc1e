#pragma once
#include <string>
#include <vector>

#include "plan/estimate.h"

namespace gdn::plan {

// A stretch of one rank's own time in which one pass of one micro-batch runs.
struct PassStretch {
  Seconds from = 0, to = 0;
  program::Pass pass = program::Pass::Forward; // Replay where a backward pass runs ops again
  int chunk = 0, micro_batch = 0;
};

// Live bytes of one rank over a step, by category, static state included. Steady periods of the
// schedule are walked as often as the peak needs; waiting for other ranks takes no time here.
struct Timeline {
  std::int64_t rank = 0;
  Seconds end = 0;
  std::vector<CategoryBytes> levels; // columns of equal time; each the fullest moment in it
  int peak = 0;                      // column of the peak
  std::vector<PassStretch> passes;
};

// The worst rank of `estimate`, which `estimator` made. `columns`: how finely time is cut.
Timeline timeline(Estimator& estimator, const Estimate& estimate, const config::Model& model, const config::Run& run, int columns = 480);

} // namespace gdn::plan
