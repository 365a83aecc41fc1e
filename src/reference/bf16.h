#pragma once
#include <bit>
#include <cstdint>

namespace gdn::reference {

// The upper half of a float: its sign, exponent and seven bits of its fraction. Storage only: arithmetic on it is
// float's.
class bf16 {
public:
  bf16() = default;
  // To nearest, ties to even; any NaN becomes the quiet one of its sign.
  explicit bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) bits_ = bits >> 31 ? 0xFFC0 : 0x7FC0;
    else bits_ = static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

private:
  std::uint16_t bits_ = 0;
};

bf16 round_to_bf16(double value); // one rounding: through float, halfway cases could round twice

} // namespace gdn::reference
