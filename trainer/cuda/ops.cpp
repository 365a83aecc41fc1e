#include "trainer/cuda/ops.h"

#include <array>

#include <fmt/core.h>

namespace gdn::trainer::cuda {

namespace {

constexpr size_t kKinds = static_cast<size_t>(model::OpKind::Toy) + 1;

std::array<OpFunctions, kKinds> build() {
  std::array<OpFunctions, kKinds> table{};
  for (auto family : {plumbing_ops(), linear_ops(), gdn_ops(), gdn2_ops(), attention_ops(), moe_ops(), routing_ops(), ends_ops(), exchange_ops()})
    for (const Entry& e : family) table[static_cast<size_t>(e.kind)] = e.functions;
  return table;
}

} // namespace

void refuse_dtype(DType found, DType expected) {
  throw Error(ErrorCode::Config, fmt::format("a kernel of the cuda device takes {}, not {}", name_of(expected), name_of(found)),
              "dtype: bf16 runs on cuda; fp32 on the cpu");
}

const GradView& only_written(const OpCall& c, const GradView& g) {
  if (g.accumulate) throw Error(ErrorCode::Internal, fmt::format("{}: its kernel writes a gradient that the op list adds to", c.name()));
  return g;
}

const View& contiguous(const OpCall& c, const View& v) {
  if (v && v.rows > 1 && v.stride != v.cols)
    throw Error(ErrorCode::Internal, fmt::format("{}: its kernel takes contiguous rows, not {} columns every {}", c.name(), v.cols, v.stride));
  return v;
}

const OpFunctions& functions_of(model::OpKind kind) {
  static const std::array<OpFunctions, kKinds> table = build();
  return table[static_cast<size_t>(kind)];
}

} // namespace gdn::trainer::cuda
