#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "config/model.h"
#include "model/op.h"
#include "model/parameters.h"

namespace gdn::model {

// Columns of linear_qkv's output: per query group its q heads, their gates where there are any, k, v.
struct QkvLayout {
  std::int64_t columns;                    // of all ranks
  std::int64_t width;                      // of one group
  std::int64_t query;                      // of a group's q section that one rank uses
  std::int64_t gate_at, key_at, value_at;  // first columns inside a group; q is at 0

  static QkvLayout of(const config::AttentionShape& s, const HeadsPerRank& heads) {
    const std::int64_t d = s.head_dim, per_group = s.heads / s.kv_heads * d;
    const std::int64_t key_at = per_group * (s.output_gate ? 2 : 1), width = key_at + 2 * d;
    return {s.kv_heads * width, width, heads.query / heads.kv * d, per_group, key_at, key_at + d};
  }
  // Where ranks share the groups: the order of the gathered columns, so that views of the first group are this rank's.
  SharedGroupAttr shared(const config::AttentionShape& s, const HeadsPerRank& heads) const {
    return {width, heads.kv_replicas, query, s.output_gate ? gate_at : 0};
  }
};

// Which column of all TP ranks', one rank's after the other's, is column j of those that `rank` gathers. Without `shared` all
// ranks gather them in that order.
inline std::vector<std::int64_t> order_of_gathered(const SharedGroupAttr* shared, std::int64_t columns, std::int64_t rank) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(columns));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  if (shared == nullptr) return order;
  std::rotate(order.begin(), order.begin() + rank / shared->replicas * shared->width, order.end());
  auto mine_first = [&](std::int64_t at) {
    const auto first = order.begin() + at;
    std::rotate(first, first + rank % shared->replicas * shared->query, first + shared->replicas * shared->query);
  };
  mine_first(0);
  if (shared->gate_at > 0) mine_first(shared->gate_at);
  return order;
}

} // namespace gdn::model
