// A few consecutive bf16 values of a row per thread, as floats.
#pragma once
#include <cstdint>

#include "kernels/common/launch.h"

namespace gdn::kernels {

// True if every row of a strided tensor can be read `values` elements at a time.
inline bool vector_rows(const void* data, std::int64_t stride, int values) {
  return reinterpret_cast<std::uintptr_t>(data) % (2 * values) == 0 && stride % values == 0;
}

// kValues bf16 as they lie in memory.
template <int kValues>
struct RawVector {
  static_assert(kValues == 4 || kValues == 8);
  std::uint32_t words[kValues / 2];

  // `vector`: one wide access; else element by element, for rows that are not aligned to it.
  __device__ static RawVector load(const Bf16* p, bool vector) {
    RawVector r;
    if (vector) {
      if constexpr (kValues == 4) {
        const uint2 x = *reinterpret_cast<const uint2*>(p);
        r.words[0] = x.x;
        r.words[1] = x.y;
      } else {
        const uint4 x = *reinterpret_cast<const uint4*>(p);
        r.words[0] = x.x;
        r.words[1] = x.y;
        r.words[2] = x.z;
        r.words[3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i)
        r.words[i] = p[2 * i].bits | static_cast<std::uint32_t>(p[2 * i + 1].bits) << 16;
    }
    return r;
  }
  __device__ static RawVector zero() {
    RawVector r;
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) r.words[i] = 0;
    return r;
  }
};

template <int kValues>
struct RowVector {
  float x[kValues];

  __device__ static float widen(std::uint16_t bits) {
    return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  }
  __device__ static std::uint16_t narrow(float value) { // round to nearest even
    std::uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  RowVector() = default;
  __device__ explicit RowVector(const RawVector<kValues>& raw) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      x[2 * i] = __uint_as_float(raw.words[i] << 16);
      x[2 * i + 1] = __uint_as_float(raw.words[i] & 0xffff0000u);
    }
  }
  __device__ static RowVector load(const Bf16* p, bool vector) {
    return RowVector(RawVector<kValues>::load(p, vector));
  }
  __device__ void store(Bf16* p, bool vector) const {
    std::uint32_t words[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    if (vector) {
      if constexpr (kValues == 4)
        *reinterpret_cast<uint2*>(p) = uint2{words[0], words[1]};
      else
        *reinterpret_cast<uint4*>(p) = uint4{words[0], words[1], words[2], words[3]};
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        p[i].bits = static_cast<std::uint16_t>(words[i / 2] >> 16 * (i % 2));
    }
  }
  __device__ static RowVector zero() { return RowVector(RawVector<kValues>::zero()); }
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

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

} // namespace gdn::kernels
