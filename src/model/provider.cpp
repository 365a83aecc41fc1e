#include "model/provider.h"

#include <array>

#include "model/static_state.h"

namespace gdn::model {

std::string_view name_of(Family family) {
  constexpr std::array kNames{"gemm",    "grouped_gemm", "attention",     "rule",      "conv",      "norm", "elementwise",
                              "permute", "router",       "cross_entropy", "embedding", "optimizer", "none"};
  static_assert(kNames.size() == static_cast<size_t>(Family::None) + 1);
  return kNames[static_cast<size_t>(family)];
}

// Gradients are zeroed, scaled before their reduction (average_in_collective off), and their shard read for the
// norm; Adam reads the shard, reads and writes its states, and the new master is cast to the parameters.
Bytes Provider::update_traffic(const StateBytes& s, std::int64_t ranks, std::int64_t shards) const {
  return s.gradients + (ranks > 1 ? 2 * s.gradients : 0) + 2 * s.gradients / shards + 2 * s.optimizer + 3 * s.parameters / shards;
}

} // namespace gdn::model
