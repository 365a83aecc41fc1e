#include "trainer/exact.h"

#include <cstring>

#include "core/error.h"
#include "trainer/cpu/wide.h"

namespace gdn::trainer {

std::byte* ExactDevice::allocate(Bytes bytes, std::string_view what) {
  std::byte* data = DecoratedDevice::allocate(bytes, what);
  shadows_[data].resize(static_cast<size_t>(2 * bytes));
  return data;
}

void ExactDevice::deallocate(std::byte* data) {
  shadows_.erase(data);
  DecoratedDevice::deallocate(data);
}

std::byte* ExactDevice::beside(const std::byte* at) {
  auto after = shadows_.upper_bound(at);
  if (after != shadows_.begin()) {
    auto& [begin, shadow] = *std::prev(after);
    const auto offset = static_cast<size_t>(2 * (at - begin));
    if (offset < shadow.size()) return shadow.data() + offset;
  }
  throw Error(ErrorCode::Internal, "exact values are asked of memory that is not this device's");
}

void ExactDevice::fill(std::byte* data, Bytes bytes, unsigned char value) {
  DecoratedDevice::fill(data, bytes, value);
  if (bytes > 0) std::memset(beside(data), value, static_cast<size_t>(2 * bytes)); // 0, or NaN where memory is poisoned
}

void ExactDevice::to_device(std::byte* to, const void* from, Bytes bytes) {
  DecoratedDevice::to_device(to, from, bytes);
  auto* exact = reinterpret_cast<double*>(beside(to));
  for (Bytes i = 0; i < bytes / 4; ++i) exact[i] = static_cast<const float*>(from)[i];
}

void ExactDevice::run(const OpCall& call) {
  auto [wide, fresh] = wide_.try_emplace(&call.list());
  if (fresh) wide->second = cpu::widened(call.list());
  // In double first: what follows reads the integers of the run in fp32.
  cpu::run_elsewhere(call, wide->second, [&](const std::byte* at, DType dtype) {
    if (dtype == DType::FP32) return beside(at);
    if (dtype == DType::BF16 || dtype == DType::FP16) throw Error(ErrorCode::Internal, "exact values belong to a run in fp32");
    return const_cast<std::byte*>(at);
  });
  inner_.run(call);
}

std::vector<double> ExactDevice::values(const float* at, std::int64_t n) {
  const auto* exact = reinterpret_cast<const double*>(beside(reinterpret_cast<const std::byte*>(at)));
  return {exact, exact + n};
}

} // namespace gdn::trainer
