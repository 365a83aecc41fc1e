#include "trainer/comm/ordered_sum.h"

#include <algorithm>
#include <type_traits>

#include <fmt/core.h>

#include "core/error.h"
#include "reference/view.h"

namespace gdn::trainer {

namespace {

template <class T> auto wide(T x) {
  if constexpr (std::is_same_v<T, reference::bf16>) return static_cast<float>(x);
  else return x;
}

template <class T, class Add>
void reduce(const std::byte* parts, int ranks, std::int64_t elements, std::byte* out, Add add) {
  const T* from = reinterpret_cast<const T*>(parts);
  T* to = reinterpret_cast<T*>(out);
  for (std::int64_t i = 0; i < elements; ++i) {
    auto value = wide(from[i]);
    for (int r = 1; r < ranks; ++r) value = add(value, wide(from[r * elements + i]));
    to[i] = static_cast<T>(value);
  }
}

} // namespace

void reduce_in_order(const std::byte* parts, int ranks, std::int64_t elements, DType dtype, Reduction reduction, std::byte* out) {
  auto of = [&]<class T>() {
    if (reduction == Reduction::Max) reduce<T>(parts, ranks, elements, out, [](auto a, auto b) { return std::max(a, b); });
    else reduce<T>(parts, ranks, elements, out, [](auto a, auto b) { return a + b; });
  };
  switch (dtype) {
  case DType::BF16: return of.template operator()<reference::bf16>();
  case DType::FP32: return of.template operator()<float>();
  case DType::FP64: return of.template operator()<double>();
  case DType::Int32: return of.template operator()<std::int32_t>();
  case DType::Int64: return of.template operator()<std::int64_t>();
  default: throw Error(ErrorCode::Internal, fmt::format("{} is never summed over ranks", name_of(dtype)));
  }
}

} // namespace gdn::trainer
