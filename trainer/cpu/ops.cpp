#include "trainer/cpu/ops.h"

#include <array>

#include <fmt/format.h>

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

View with_rows(const OpCall& c, View v, std::int64_t rows) {
  if (!v || v.rows == rows) return v;
  const std::int64_t n = v.rows * v.cols;
  if ((v.rows > 1 && v.stride != v.cols) || n % rows != 0)
    throw Error(ErrorCode::Internal, fmt::format("{}: a strided [{}, {}] operand cannot be seen as {} rows", c.name(), v.rows, v.cols, rows));
  v.rows = rows;
  v.cols = v.stride = n / rows;
  return v;
}

const OpFunctions& functions_of(model::OpKind kind) {
  static const std::array<OpFunctions, kKinds> table = build();
  return table[static_cast<size_t>(kind)];
}

} // namespace gdn::trainer::cpu
