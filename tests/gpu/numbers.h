// bf16 on the host and a deterministic generator.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/common/launch.h"

namespace gdn::gpu_test {

using kernels::Bf16;

inline Bf16 to_bf16(float x) { // round to nearest even; NaN stays NaN
  auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return {0x7fff};
  bits += 0x7fff + ((bits >> 16) & 1);
  return {static_cast<std::uint16_t>(bits >> 16)};
}
inline float to_float(Bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline double value(Bf16 x) { return to_float(x); }
inline double value(float x) { return x; }

// Deterministic numbers: a counter through a mixing function (splitmix64).
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; } // [0, 1)
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
  }
};

} // namespace gdn::gpu_test
