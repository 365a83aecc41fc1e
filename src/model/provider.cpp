#include "model/provider.h"

#include <array>

namespace gdn::model {

std::string_view name_of(Family family) {
  constexpr std::array kNames{"gemm",    "grouped_gemm", "attention",     "rule",      "conv",      "norm", "elementwise",
                              "permute", "router",       "cross_entropy", "embedding", "optimizer", "none"};
  static_assert(kNames.size() == static_cast<size_t>(Family::None) + 1);
  return kNames[static_cast<size_t>(family)];
}

} // namespace gdn::model
