#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "program/summary.h"

namespace gdn::program {

// One chunk (virtual stage) of this rank running one pass of one micro-batch.
struct Slot {
  Pass pass = Pass::Forward; // Forward or Backward
  int chunk = 0, micro_batch = 0;
};

// The order in which pipeline rank `rank` of `pp` runs its `vp` chunks over `micro_batches`.
// vp = 1: 1F1B, min(m, pp - rank) micro-batches in flight. vp > 1: interleaved, warm-up
// w = 2 (pp - rank - 1) + (vp - 1) group capped at m vp (megatron-core schedules); `group` is
// microbatch_group_size_per_vp_stage, 0 means pp. `ahead`: forwards more in the warm-up; 1 where a forward runs beside
// the backward of another micro-batch (overlap_moe_expert_parallel_comm).
std::vector<Slot> one_f_one_b(int pp, int rank, int vp, int micro_batches, int group = 0, int ahead = 0);

// Forwards of that order before its first pair of a forward and a backward.
int warm_up_forwards(int pp, int rank, int vp, int micro_batches, int group = 0, int ahead = 0);

// A smaller number of micro-batches with the same peak: the steady period is walked once.
int steady_micro_batches(int pp, int vp, int micro_batches, int group = 0, int ahead = 0);

// Where a step's level is highest.
struct StepPeak {
  Bytes bytes = 0;
  CategoryBytes by = {};
  int slot = -1, unit = -1, event = -1; // unit: index within the slot's chunk
  Pass pass = Pass::Forward;

  void raise(const CategoryBytes& base, const Peak& peak, int at_slot, int at_unit, Pass at_pass);
};

struct Walk {
  StepPeak overall, forward, backward, replay;
  Bytes end_level = 0; // above the base, after the last slot (attributes that outlive the step)
};

// Walks the composed summaries of every chunk's units through `slots`, above `base`. Exact: equal
// to the levels of the flat program, event by event, at every maximum.
Walk walk(const std::vector<std::vector<const UnitSummary*>>& chunks, const std::vector<Slot>& slots,
          const CategoryBytes& base);

} // namespace gdn::program
