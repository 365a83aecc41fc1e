#include "reference/view.h"

#include <bit>
#include <cmath>

#include "reference/detail.h"

namespace gdn::reference {

double ConstValues::get(int64 i, int64 j) const {
  const int64 k = i * stride + j;
  switch (type) {
  case DType::BF16: return static_cast<double>(static_cast<const bf16*>(data)[k]);
  case DType::FP32: return static_cast<const float*>(data)[k];
  case DType::FP64: return static_cast<const double*>(data)[k];
  case DType::Int32: return static_cast<const std::int32_t*>(data)[k];
  case DType::Int64: return static_cast<double>(static_cast<const int64*>(data)[k]);
  case DType::Bool: return static_cast<const bool*>(data)[k] ? 1 : 0;
  default: break;
  }
  throw Error(ErrorCode::Internal,
              "reference op: no elements of dtype " + std::string(name_of(type)) + " on the CPU");
}

void Values::set(int64 i, int64 j, double value) const {
  const int64 k = i * stride + j;
  switch (type) {
  // From double to bf16 in one rounding: through float, the halfway cases could round twice.
  case DType::BF16: static_cast<bf16*>(data)[k] = round_to_bf16(value); return;
  case DType::FP32: static_cast<float*>(data)[k] = static_cast<float>(value); return;
  case DType::FP64: static_cast<double*>(data)[k] = value; return;
  case DType::Int32: static_cast<std::int32_t*>(data)[k] = static_cast<std::int32_t>(value); return;
  case DType::Int64: static_cast<int64*>(data)[k] = static_cast<int64>(value); return;
  case DType::Bool: static_cast<bool*>(data)[k] = value != 0; return;
  default: break;
  }
  throw Error(ErrorCode::Internal,
              "reference op: no elements of dtype " + std::string(name_of(type)) + " on the CPU");
}

bf16 round_to_bf16(double value) {
  float f = static_cast<float>(value);
  // Round to odd when the first rounding was inexact: the sticky bit keeps the second one right.
  if (static_cast<double>(f) != value && std::isfinite(f)) {
    auto bits = std::bit_cast<std::uint32_t>(f);
    if (std::abs(static_cast<double>(f)) > std::abs(value)) --bits; // toward zero
    f = std::bit_cast<float>(bits | 1u);
  }
  return bf16(f);
}

} // namespace gdn::reference
