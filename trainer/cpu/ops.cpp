#include "trainer/cpu/ops.h"

#include <array>

namespace gdn::trainer::cpu {

namespace {

constexpr size_t kKinds = static_cast<size_t>(model::OpKind::Toy) + 1;

std::array<OpFunctions, kKinds> build() {
  std::array<OpFunctions, kKinds> table{};
  for (auto family : {plumbing_ops(), linear_ops(), exchange_ops(), gdn_ops(), fused_ops(), gdn2_ops(), attention_ops(), moe_ops(), routing_ops(), ends_ops()})
    for (const Entry& e : family) table[static_cast<size_t>(e.kind)] = e.functions;
  table[static_cast<size_t>(model::OpKind::Toy)].reason = "it stands for no computation";
  return table;
}

} // namespace

const OpFunctions& functions_of(model::OpKind kind) {
  static const std::array<OpFunctions, kKinds> table = build();
  return table[static_cast<size_t>(kind)];
}

} // namespace gdn::trainer::cpu
