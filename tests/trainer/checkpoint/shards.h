#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "trainer/checkpoint/shard.h"

// Shards by brute force: every element of a tensor is asked who holds it.
namespace gdn::test {

struct ParallelRank {
  config::Parallel parallel;
  trainer::checkpoint::ShardRanks ranks;
};

// All ranks of a topology that hold different weights: tp x etp x ep, each group counted alone.
inline std::vector<ParallelRank> ranks_of(std::int64_t tp, std::int64_t ep, std::int64_t etp) {
  std::vector<ParallelRank> all;
  for (std::int64_t t = 0; t < tp; ++t)
    for (std::int64_t e = 0; e < ep; ++e)
      for (std::int64_t x = 0; x < etp; ++x) {
        ParallelRank r;
        r.parallel.tp = tp;
        r.parallel.ep = ep;
        r.parallel.etp = etp;
        r.ranks = {t, x, e};
        all.push_back(r);
      }
  return all;
}

// Flat indices of a rank's elements in the order in which it stores them: the tensor's own order, as
// sections keep theirs.
inline std::vector<std::int64_t> held_by(const model::Parameter& p, const ParallelRank& r) {
  const bool expert = p.group == model::ParameterGroup::RoutedExpert;
  const std::int64_t parts = p.rule() == model::ShardRule::Replicated ? 1 : expert ? r.parallel.etp : r.parallel.tp;
  const std::int64_t part = parts == 1 ? 0 : expert ? r.ranks.etp : r.ranks.tp;
  std::int64_t inner = 1, elements = 1;
  for (size_t d = 0; d < p.shape.size(); ++d) {
    elements *= p.shape[d];
    if (static_cast<int>(d) > p.dim) inner *= p.shape[d];
  }
  const std::int64_t rows = p.shape[static_cast<size_t>(p.dim)];
  std::vector<std::int64_t> held;
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::int64_t row = i / inner % rows;
    if (expert) {
      const std::int64_t experts = p.shape[0], each = experts / r.parallel.ep;
      if (i / (elements / experts) / each != r.ranks.ep) continue;
    }
    std::int64_t first = 0, size = rows; // of what is split evenly around the row
    if (p.repeats == 0)
      for (const model::Section& s : p.sections) {
        size = s.size;
        if (row < first + size) break;
        first += size;
      }
    if ((row - first) / (size / parts) == part) held.push_back(i);
  }
  return held;
}

// The same from a shard's extents.
inline std::vector<std::int64_t> held_by(const trainer::checkpoint::Shard& shard, const trainer::checkpoint::Shape& shape) {
  std::vector<std::int64_t> held(static_cast<size_t>(shard.count), -1);
  for (const trainer::checkpoint::Extent& e : trainer::checkpoint::extents(shard, shape))
    for (std::int64_t i = 0; i < e.count; ++i) held[static_cast<size_t>(e.local + i)] = e.global + i;
  return held;
}

} // namespace gdn::test
