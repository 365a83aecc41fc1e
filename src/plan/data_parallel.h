#pragma once
#include <vector>

#include "cost/cost.h"
#include "model/static_state.h"

namespace gdn::plan {

// What exchanges between data-parallel ranks leave on the clock of a step.
struct DataParallelTime {
  Seconds reduced = 0;  // gradients, behind the last backward
  Seconds gathered = 0; // parameters, behind the update, or waited for by the first forward
  Seconds total() const { return reduced + gathered; }
};

// One unit of a pipeline rank: trainable elements of this rank, and passes of one micro-batch.
struct UnitState {
  std::int64_t chunk = 0; // of the rank, in model order
  std::int64_t dense = 0, expert = 0;
  Seconds forward = 0, backward = 0;
};

// `units` of pipeline rank `rank` in model order; read only where the run overlaps. Then buckets are filled from the
// last unit to the first; each is reduced once the last micro-batch has made its gradients, and gathered before the
// first micro-batch reaches its first unit. Buckets of max(40 M, 1 M x DP x CP) elements, dense or expert, in the first
// chunk of the first rank; one bucket for any other chunk (DistributedDataParallel of Megatron-LM main d98e8a64).
DataParallelTime data_parallel_time(const cost::CostModel& cost, const config::Run& run, const model::StaticState& state,
                                    std::int64_t rank, const std::vector<UnitState>& units);

} // namespace gdn::plan
