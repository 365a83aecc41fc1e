#pragma once
#include <vector>

#include "cost/cost.h"
#include "model/stages.h"
#include "plan/setting.h"
#include "program/schedule.h"

// What a setting needs and takes at least, from composed summaries in a microsecond: search prunes by
// it. Everything an exact walk adds (attributes that outlive their micro-batch, reduction, update,
// waiting for the neighbour stage) can only raise memory and time, so a pruned candidate is proven out.
namespace gdn::plan {

// A run of units, relative to the level before it; composition is associative.
struct Extent {
  Bytes retained = 0;             // by one micro-batch, between its forward and its backward
  Bytes forward = 0, backward = 0; // peaks; `backward` over the level before the backward, `retained` in it
  Seconds forward_time = 0, backward_time = 0;

  Extent then(const Extent& next) const;
};
// `hidden`: seconds of its forward, and of its backward, that may run beside another micro-batch.
Extent extent_of(const program::UnitSummary& summary, const cost::UnitTime& time, Seconds hidden_forward = 0, Seconds hidden_backward = 0);

// The fullest moments of one rank's schedule: how many micro-batches of each chunk are retained when
// `chunk` runs a pass. Moments that another one covers are left out.
struct Moment {
  int chunk = 0;
  std::vector<int> in_flight; // per chunk, the running pass not counted
};
std::vector<Moment> fullest_moments(int pp, int rank, int vp, int micro_batches, int ahead = 0);

// Units of one op-list shape (TP, CP, EP, ETP, micro-batch) under one setting.
struct ShapeExtents {
  std::vector<Extent> kinds;      // a decoder layer of each kind, in the order the caller numbers them
  std::vector<Extent> full;       // the same under one whole-block span (full granularity)
  Bytes input = 0;                // the residual stream between two layers
  Extent embedding, head;
};

struct Bound {
  Bytes peak = 0;    // allocated, of the fullest rank
  Seconds step = 0;
};

// `chunks` in model order (chunk i on rank i % pp), `kind_of[layer]`, `moments[rank]`, `state[rank]`.
Bound lower_bound(const ShapeExtents& shape, const Setting& setting, const std::vector<model::Chunk>& chunks,
                  const std::vector<int>& kind_of, const std::vector<std::vector<Moment>>& moments,
                  const std::vector<Bytes>& state, std::int64_t micro_batches);

} // namespace gdn::plan
