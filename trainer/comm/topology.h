#pragma once
#include <cstdint>
#include <vector>

#include "config/run.h"
#include "model/op.h"

// Which rank does what: a pure function of the sizes, in the order of megatron-core ("tp-cp-ep-dp-pp").
namespace gdn::trainer {

// A rank's place in every group. Dense parts of a model are divided as rank = tp + TP (cp + CP (dp + DP pp)),
// experts as rank = etp + ETP (ep + EP (edp + EDP pp)).
struct Place {
  std::int64_t tp = 0, cp = 0, dp = 0, pp = 0;
  std::int64_t etp = 0, ep = 0, edp = 0;
};

class Topology {
public:
  // Throws Error{Config} unless the sizes divide the world.
  explicit Topology(const config::Parallel& parallel);

  const config::Parallel& parallel() const { return parallel_; }
  std::int64_t size() const { return parallel_.gpus; }
  Place place(std::int64_t rank) const;
  // World ranks of the group of `kind` that holds `rank`, ascending: in the order of their place in it.
  std::vector<int> members(std::int64_t rank, model::Group kind) const;
  // Ranks with the same dense weights: data and context parallel together.
  std::vector<int> dense_replicas(std::int64_t rank) const;
  // First and last pipeline rank of this rank's pipeline: both hold the word embedding of a tied model.
  std::vector<int> pipeline_ends(std::int64_t rank) const;
  std::int64_t size_of(model::Group kind) const;

private:
  template <class Same> std::vector<int> where(Same same) const;
  config::Parallel parallel_;
};

} // namespace gdn::trainer
