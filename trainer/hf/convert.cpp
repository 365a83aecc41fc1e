#include "trainer/hf/convert.h"

#include <cstring>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer::hf {

namespace {

std::uint16_t to_bf16(std::uint32_t fp32) {
  const bool nan = (fp32 & 0x7fffffffu) > 0x7f800000u;
  if (nan) return static_cast<std::uint16_t>((fp32 >> 16) | ((fp32 & 0x007f0000u) == 0 ? 0x40u : 0u));
  return static_cast<std::uint16_t>((fp32 + 0x7fffu + ((fp32 >> 16) & 1u)) >> 16);
}

} // namespace

void convert(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t n) {
  auto known = [](DType d) { return d == DType::BF16 || d == DType::FP32; };
  if (!known(from) || !known(to))
    throw Error(ErrorCode::Internal, fmt::format("no conversion of weights from {} to {}", name_of(from), name_of(to)));
  if (from == to) {
    std::memcpy(out, in, static_cast<size_t>(n * size_of(from)));
  } else if (from == DType::BF16) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, in + 2 * i, 2);
      const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
      std::memcpy(out + 4 * i, &wide, 4);
    }
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, in + 4 * i, 4);
      const std::uint16_t narrow = to_bf16(bits);
      std::memcpy(out + 2 * i, &narrow, 2);
    }
  }
}

} // namespace gdn::trainer::hf
