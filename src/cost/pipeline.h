#pragma once
#include <vector>

#include "core/units.h"
#include "program/schedule.h"

namespace gdn::cost {

struct PipelineTime {
  Seconds total = 0;   // first forward to last backward, over all ranks
  Seconds busy = 0;    // of the busiest rank
  std::vector<Seconds> ends = {}; // of each rank
  double bubble() const { return total > 0 ? 1 - busy / total : 0; }
};

// Runs the real schedule of every rank with its dependencies: a forward of chunk c on rank r waits
// for the previous virtual stage's forward of the same micro-batch and its transfer; a backward for
// the next stage's backward. `forward[r][c]`, `backward[r][c]`: seconds of one micro-batch.
struct PipelineOptions {
  Seconds transfer = 0;      // to the neighbour
  bool beside = true;        // transfers run beside compute; else a rank waits while it receives
  // `saved[r][f][b]`: what a forward of chunk f and the backward of chunk b right behind it take less together than
  // one after the other. Empty: nothing. Both then begin when both can; the warm-up is one forward longer and has no pairs.
  std::vector<std::vector<std::vector<Seconds>>> saved = {};
};
PipelineTime simulate_pipeline(const std::vector<std::vector<program::Slot>>& slots,
                               const std::vector<std::vector<Seconds>>& forward,
                               const std::vector<std::vector<Seconds>>& backward, const PipelineOptions& options);

} // namespace gdn::cost
