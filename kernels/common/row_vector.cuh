// A few consecutive bf16 values of a row per thread, as floats.
#pragma once
#include <cstdint>

#include "kernels/common/launch.h"

namespace gdn::kernels {

// True if every row of a strided tensor can be read `values` elements at a time.
inline bool vector_rows(const void* data, std::int64_t stride, int values) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * values) == 0 && stride % values == 0;
}

template <int kValues>
struct RowVector {
  static_assert(kValues == 4 || kValues == 8);
  float x[kValues];

  __device__ static float widen(std::uint16_t bits) {
    return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  }
  __device__ static std::uint16_t narrow(float value) { // round to nearest even
    std::uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  // `vector`: one wide access; else element by element, for rows that are not aligned to it.
  __device__ static RowVector load(const Bf16* p, bool vector) {
    RowVector r;
    if (vector) {
      std::uint16_t bits[kValues];
      if constexpr (kValues == 4)
        *reinterpret_cast<uint2*>(bits) = *reinterpret_cast<const uint2*>(p);
      else
        *reinterpret_cast<uint4*>(bits) = *reinterpret_cast<const uint4*>(p);
#pragma unroll
      for (int i = 0; i < kValues; ++i) r.x[i] = widen(bits[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) r.x[i] = widen(p[i].bits);
    }
    return r;
  }
  __device__ void store(Bf16* p, bool vector) const {
    if (vector) {
      alignas(16) std::uint16_t bits[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) bits[i] = narrow(x[i]);
      if constexpr (kValues == 4)
        *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(bits);
      else
        *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(bits);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) p[i].bits = narrow(x[i]);
    }
  }
  __device__ static RowVector zero() {
    RowVector r;
#pragma unroll
    for (int i = 0; i < kValues; ++i) r.x[i] = 0.0f;
    return r;
  }
};

// Sum over groups of `kLanes` neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// Both tails keep their relative precision.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = __expf(-fabsf(x));
  return x >= 0.0f ? __fdividef(1.0f, 1.0f + e) : __fdividef(e, 1.0f + e);
}

__device__ __forceinline__ float softplus(float x) {
  return x > 20.0f ? x : log1pf(expf(x));
}

} // namespace gdn::kernels
